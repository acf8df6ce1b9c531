"""MXFP4: 4-bit weights with one scale byte for every GROUP of them."""

from k3kernels.mxfp4.reference import GROUP as GROUP
from k3kernels.mxfp4.reference import NAN_SCALE as NAN_SCALE
from k3kernels.mxfp4.reference import pack as pack
from k3kernels.mxfp4.reference import packed_shapes as packed_shapes
from k3kernels.mxfp4.reference import repack as repack
from k3kernels.mxfp4.reference import unpack as unpack
