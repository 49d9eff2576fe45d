"""What a finished run says about itself: which layers it made, how well, how long it took, and what fell back."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

REPORT_FILE = "quantization_report.json"
TOLD_ONE_BY_ONE = 8


class _Record(BaseModel):
    # A record read back may have been written by a later version with more to say.
    model_config = ConfigDict(frozen=True, extra="ignore")


class ModuleReport(_Record):
    """One linear module."""

    name: str = Field(description="Name inside its layer.")
    method: str = Field(description="What quantized it in the end.")
    loss: float = Field(description="Mean squared output error per token and output channel; RTN: of the weights.")
    tokens: int = Field(0, description="Calibration tokens that reached it.")
    damp_percent: float | None = Field(None, description="Damping that its Hessian needed.")
    adapter_loss: float | None = Field(None, description="Mean squared output error that is left with its adapter.")
    fallback: str | None = Field(
        None, description="Why it was quantized without its inputs: by most methods rounded to nearest."
    )
    unscaled: str | None = Field(None, description="Why its input channels could not be scaled, where they should be.")


class LayerReceipt(_Record):
    """What the task of one layer returns and Prefect keeps: digests and figures, never tensors."""

    index: int
    name: str
    key: str = Field(description="Cache key of the task, under which this record lies in the checkpoint.")
    sha256: str = Field(description="Digest of the layer's object.")
    size: int = Field(description="Bytes of the layer's object.")
    adapter_sha256: str | None = Field(None, description="Digest of the object with the layer's adapter.")
    loss: float = Field(description="Mean of the modules' losses.")
    tokens: int
    seconds: float
    modules: tuple[ModuleReport, ...]
    expert_tokens: tuple[int, ...] = Field(
        (), description="Calibration tokens that reached each expert, by its number."
    )

    @property
    def fallbacks(self) -> tuple[ModuleReport, ...]:
        return tuple(module for module in self.modules if module.fallback is not None)

    def fallback_lines(self) -> list[str]:
        """What was quantized without its inputs, and why: module by module, but in one line where a reason holds for many."""
        by_reason: dict[str | None, list[str]] = {}
        for module in self.fallbacks:
            by_reason.setdefault(module.fallback, []).append(f"`{self.name}.{module.name}`")
        lines = []
        for reason, names in by_reason.items():
            if len(names) > TOLD_ONE_BY_ONE:  # experts without tokens come by the hundred
                others = len(names) - 1
                lines.append(
                    f"{names[0]} and {others} more modules of the layer were quantized without their inputs: {reason}"
                )
            else:
                lines += [f"{name} was quantized without its inputs: {reason}" for name in names]
        return lines


class Report(_Record):
    """The result of `quantize_model`; also written beside the model, with the digests of all other files."""

    status: Literal["done", "verified"] = Field(
        description="`done`: this run finished the export; `verified`: it was there already and is whole."
    )
    model: str
    method: str
    output: str
    checkpoint: str
    identity: str = Field(description="Digest of everything that decides the result.")
    layers: tuple[LayerReceipt, ...]
    loss: float = Field(description="Mean of the layers' losses.")
    fallbacks: int = Field(description="Modules that were quantized without their inputs instead of as asked for.")
    size: int = Field(description="Bytes of all weights written.")
    seconds: float
    resumed_from: int | None = Field(None, description="Layers that were finished when this run began, if any.")
    calibration: dict[str, Any] = Field(default_factory=dict, description="Samples and tokens, used and dropped.")

    @classmethod
    def of(cls, receipts: list[LayerReceipt], **about: Any) -> "Report":
        """The report of a run that has finished the layers of `receipts`."""
        losses = [receipt.loss for receipt in receipts]
        return cls(
            layers=tuple(receipts),
            loss=sum(losses) / len(losses) if losses else 0.0,
            fallbacks=sum(len(receipt.fallbacks) for receipt in receipts),
            **about,
        )

    def published(self) -> dict[str, Any]:
        """What is written into the model's directory: everything but where things lie on this machine."""
        return self.model_dump(mode="json", exclude={"output", "checkpoint"})
