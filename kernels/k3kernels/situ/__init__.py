"""SiTU gated activation."""

from k3kernels.situ.eager import situ as situ
