"""Which tensors a model needs against which its source has: whatever does not fit is fatal, never made up at random."""

from collections.abc import Collection, Iterable, Mapping

import torch

from tasks.models.source import SourceError, SourceModel

# Tables that old checkpoints stored; the model computes them from its configuration.
DERIVABLE = (
    ".rotary_emb.inv_freq",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
    ".embeddings.position_ids",
)
PIECE = 1 << 20  # values looked at together
PLAIN_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})


def tensor_problems(
    source: SourceModel,
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    untied_heads: Collection[str],
    carried: Collection[str] = (),
) -> list[str]:
    """Everything that is missing, unexpected, of another shape or not a plain float.

    `expected` are the shapes of the tensors the model needs. `tied` are second names of others (lm_head of a tied
    model, by the embedding's name): such a tensor may be absent, or the same bytes, and is then never written; with
    other bytes there is no telling which one the model means, so it is refused. `untied_heads` are the tensors that
    another tie_word_embeddings would have tied. `carried` are tensors that are kept although the model needs them not.
    """
    found = source.tensors
    problems = [f"`{name}` is missing" for name in expected if name not in found]
    if any(name in expected and name not in found for name in untied_heads):
        problems.append("config.json has tie_word_embeddings=false: set it to true if the embedding is the head")
    problems += [
        f"`{name}` is unexpected"
        for name in found
        if name not in expected and name not in tied and name not in carried and not name.endswith(DERIVABLE)
    ]
    for name, shape in expected.items():
        if name in found and found[name].shape != shape:
            problems.append(f"`{name}` has the shape {list(found[name].shape)}; config.json makes it {list(shape)}")
        if name in found and found[name].dtype not in PLAIN_DTYPES:
            problems.append(f"`{name}` is {found[name].dtype}, not a plain float: the source is quantized already")
    for name, other in tied.items():
        if name in found and other in found and not source.are_equal(name, other):
            problems.append(
                f"config.json has tie_word_embeddings=true, but `{name}` differs from `{other}`: set it to false to "
                f"keep both, or remove `{name}`"
            )
    return problems


def refuse_not_finite(source: SourceModel, names: Iterable[str]) -> None:
    """SourceError naming each of these tensors that holds NaN or Inf; for what is exported without being quantized."""
    problems = []
    for name in names:
        pieces = source.load([name])[name].flatten().split(PIECE)
        if count := sum(int((~torch.isfinite(piece)).sum()) for piece in pieces):
            problems.append(
                f"`{name}` holds {count} values that are NaN or infinite: the file is damaged, fetch it again"
            )
    if problems:
        raise SourceError(source.path, problems)
