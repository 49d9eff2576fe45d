"""Finished layers -> one .gguf file: header, then every tensor in the plan's order, one in memory at a time."""

from functools import lru_cache

from torch import Tensor

from checkpoint_store.tensors import tensors_from
from tasks import running
from tasks.formats.gguf import make_file, rope_factors
from tasks.formats.gguf_plan import TensorPlan
from tasks.gguf_scheme import GGUFScheme
from tasks.output_directory import GGUF_FILE, Export


def add_gguf(run: running.Run, export: Export) -> int:
    """Put the file together from the layers' objects and the source's outer tensors; the bytes of all tensors."""
    scheme = run.scheme
    assert isinstance(scheme, GGUFScheme)
    refs = {ref.key: ref for ref in run.session.layer_objects()}

    @lru_cache(maxsize=1)  # the plan goes layer by layer
    def layer_tensors(layer: int) -> dict[str, Tensor]:
        return tensors_from(run.session.view(refs[run.decoder.layer_name(layer)]))

    def load(entry: TensorPlan) -> Tensor:
        if entry.layer is not None:
            return layer_tensors(entry.layer)[entry.name]
        if entry.source is None:
            return rope_factors(scheme.model_config)
        return scheme.carry(run.source.load([entry.source]))[entry.name]

    file = make_file(scheme.plan, scheme.model_config, scheme.tokenizer())
    export.add_pieces(GGUF_FILE, file.pieces(load))
    return scheme.plan.size_bytes
