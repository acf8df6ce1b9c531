"""Log-probabilities of given tokens under a linear head: the definition over whole logits, and block by block."""

from k3kernels.linear_logprob.eager import MAX_LOGITS as MAX_LOGITS
from k3kernels.linear_logprob.eager import linear_logprob as linear_logprob
from k3kernels.linear_logprob.eager import linear_logprob_and_entropy as linear_logprob_and_entropy
from k3kernels.linear_logprob.wide import MAX_WEIGHT as MAX_WEIGHT
from k3kernels.linear_logprob.wide import wide_logits as wide_logits
