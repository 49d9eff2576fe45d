"""What EXL3 costs and gains: weights per second and what bounds them, error of Gaussian weights, output error beside GPTQ.

    python benchmarks/exl3.py speed [--bits 2 3 4 ...] [--tiles N] [--compiled]
    python benchmarks/exl3.py scales [--bits ...] [--codebook mcg]
    python benchmarks/exl3.py quality

`speed` times the search for paths, by the processor time of all threads and by the clock. Beside it stands the time that
one pass over a tile's 65,536 edges takes (a product in place); a plain step takes four passes, of which two also read from
elsewhere, and one of the nodes, a 256th of the way back and some microseconds of torch's own. `--compiled` times what
`compiled` asks for too, where a C++ compiler is at hand.

`scales` gives the mean squared error of unit Gaussian weights by the scale at which they are coded: where it is least is
USUAL_SCALES in tasks/methods/exl3.py.

`quality` compares output errors on random weights (512 x 512) and correlated inputs: SmolLM2's sizes are no multiples of
128, so benchmarks/quality.py can't.

Measured on an AMD EPYC with AVX2 and 1 MiB of L2 a core, 2026-11-29, while a dozen other processes shared the two cores: the
clock says nothing then, processor time is what counts. One thread, `speed --tiles 16 --compiled`; a pass took 3.7 us:

    bits                             2       3       4       5       6       7       8
    plain, weights/s of a core  11,171  13,012  13,172  13,443  16,186  17,178  16,944
    compiled                    19,331  23,428  25,675  27,052

`quality`, output error as a share of the output's power:

    bits    exl3      exl3, no Hessian   gptq g128 asym   rtn g128 asym
    2       0.008403  0.068478           0.042625         0.298610
    3       0.001800  0.017213           0.006575         0.059867
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tasks.methods import exl3, gptq, rtn
from tasks.methods.exl3_trellis import CODEBOOKS, MOST_COMPILED_BITS, TILE, WORD_BITS, Trellis, codebook
from tasks.quantization import EXL3Config, GPTQConfig

SCALES = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05)


def seconds_each(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Processor and clock seconds of one call, the better of three rounds, after one that is not counted."""
    work()
    rounds = []
    for _ in range(3):
        processor, clock = time.process_time(), time.perf_counter()
        for _ in range(times):
            work()
        rounds.append(((time.process_time() - processor) / times, (time.perf_counter() - clock) / times))
    return min(rounds)


def speed(widths: list[int], tiles: int, is_compiled: bool) -> None:
    tiles_BL = torch.randn(tiles, TILE, generator=torch.Generator().manual_seed(0))
    edges_S = torch.ones(1 << WORD_BITS)
    one_pass, _ = seconds_each(lambda: torch.mul(edges_S, edges_S, out=edges_S), 1000)
    print(f"threads {torch.get_num_threads()}; a pass over 65,536 float32 in the cache: {one_pass * 1e6:.1f} us")
    print("bits            us/step  passes   weights/s of a core   weights/s by the clock")
    for bits in widths:
        for compiled in (False, True) if is_compiled and bits <= MOST_COMPILED_BITS else (False,):
            trellis = Trellis(codebook("mcg"), bits, compiled)
            processor, clock = seconds_each(lambda trellis=trellis: trellis.search(tiles_BL), 1)  # type: ignore[misc]
            step, weights = processor / tiles / (2 * TILE), tiles * TILE
            print(
                f"{bits:4} {'compiled' if compiled else 'plain':9} {step * 1e6:8.1f} {step / one_pass:7.1f} "
                f"{weights / processor:21,.0f} {weights / clock:24,.0f}",
                flush=True,
            )


def scales(widths: list[int], name: str, tiles: int) -> None:
    tiles_BL = torch.randn(tiles, TILE, generator=torch.Generator().manual_seed(0))
    tiles_BL /= tiles_BL.square().mean().sqrt()
    for bits in widths:
        trellis = Trellis(codebook(name), bits)
        errors = {}
        for scale in SCALES:
            applied = scale * exl3.SPREADS[name]
            errors[scale] = float(
                (trellis.decode(trellis.search(tiles_BL * applied)) / applied - tiles_BL).square().mean()
            )
        best = min(errors, key=lambda scale: errors[scale])
        listed = "  ".join(f"{scale:g}: {error:.6f}" for scale, error in errors.items())
        print(f"{name} {bits} bits (bound {4.0**-bits:.6f}): best at {best:g}   {listed}")


def quality() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 512
    weight_NK = torch.randn(size, size, generator=generator) * 0.02
    weight_NK *= torch.exp(torch.randn(size, generator=generator) * 0.3)
    mixing_KK = torch.randn(size, size, generator=generator) * torch.exp(-torch.arange(size) / 80.0)
    x_TK = torch.randn(4 * size, size, generator=generator) @ mixing_KK.t()
    x_TK *= torch.exp(torch.randn(size, generator=generator) * 0.5)
    hessian_KK = 2 * x_TK.t() @ x_TK / len(x_TK)
    power = float((x_TK @ weight_NK.t()).square().mean())

    def tell(what: str, dequantized_NK: Tensor) -> None:
        error = float((x_TK @ (dequantized_NK - weight_NK).t()).square().mean())
        print(f"{what:28} output error {error / power:.6f}", flush=True)

    for bits in (2, 3, 4):
        tell(f"exl3 {bits} bit", exl3.quantize_weight(weight_NK, hessian_KK, EXL3Config(), bits, "m", 0).dequantize())
        tell(
            f"exl3 {bits} bit, no Hessian",
            exl3.quantize_weight(weight_NK, None, EXL3Config(), bits, "m", 0).dequantize(),
        )
        for sym in (True, False):
            config = GPTQConfig(bits=bits, group_size=128, sym=sym, checkpoint_format="gptq_v2")  # type: ignore[arg-type]
            grid = f"{bits} bit g128 {'sym' if sym else 'asym'}"
            factor = gptq.factor_hessian(hessian_KK, config)
            tell(f"gptq {grid}", gptq.quantize_rows(weight_NK, factor, config).dequantize())
            tell(f"rtn  {grid}", rtn.quantize_rows(weight_NK, config).dequantize())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "scales", "quality"))
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--tiles", type=int, default=32)
    parser.add_argument("--codebook", choices=CODEBOOKS, default="mcg")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments.bits, arguments.tiles, arguments.compiled)
    elif arguments.what == "scales":
        scales(arguments.bits, arguments.codebook, arguments.tiles)
    else:
        quality()


if __name__ == "__main__":
    main()
