"""Short convolution with SiLU."""

from k3kernels.short_conv.eager import short_conv as short_conv
