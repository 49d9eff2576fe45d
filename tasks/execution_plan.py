"""How a layer's work is cut up, and the revisions of our own numerics: what decides bits beside the job itself.

All of it is in the identity. Raise a revision with every change that can change an exported byte: checkpoints of the old
one are then refused instead of being finished with the new.
"""

# Calibration batches are summed in so many lanes, whatever the number of devices; lanes are merged in order.
LANES = 8
# Rows of a subset's stacked weights that are quantized together, by whichever device.
UNIT_ROWS = 2048

METHOD_REVISIONS = {
    "gptq": 2, "rtn": 1, "awq": 2, "qqq": 2, "fp8": 1, "bitsandbytes": 1, "gguf": 1, "exl3": 1, "paroquant": 1,
}  # fmt: skip
LAYOUT_REVISIONS = dict.fromkeys(
    ("gptq", "awq", "qqq", "compressed-tensors", "fp8", "bitsandbytes", "gguf", "exl3", "paroquant"), 1
)
ADAPTER_REVISIONS = {"eora": 1}
FORWARD_REVISION = 1
