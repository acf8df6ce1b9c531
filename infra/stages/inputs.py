"""What all stages of one run share. Alone in its file, so that a flow can name it without loading a model."""

from __future__ import annotations

from dataclasses import dataclass

from k3core.types import Ref


@dataclass(frozen=True, slots=True)
class Inputs:
    """Common to all stages of a run. `config` holds what the weights depend on (see `context.stage_config`).

    init: the heads of the checkpoint's files that the run starts from (`infra.init_identity`); None from scratch.
    """

    config: Ref
    tokenizer: Ref
    init: Ref | None = None
