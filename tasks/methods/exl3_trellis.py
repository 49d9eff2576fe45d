"""Trellis codes: 256 weights become one closed path through 2^16 states, found by Viterbi's algorithm.

QTIP (arXiv 2406.11235) in the variant of the EXL3 format. A tile is a ring of 256 symbols of `bits` bits. The value at a
position is looked up by the 16 bits that end there: its own symbol and those before it, round the ring. So a weight
costs `bits` bits and is chosen from 2^16 values, as far as its neighbours leave it free. The values are not stored:
each is computed from its 16-bit word by a multiplication and a few bit operations, which make it look Gaussian.

Finding the best path. A node is what one step hands to the next, the last 16 - bits bits; a word is an edge from the
node of its upper bits to the node of its lower bits. One step tries all 2^16 edges: the cost of a node is the least of
the 2^bits edges into it. Only the costs are kept, not which edge won: the way back finds that again, for the one node
it is at, by the same sums. A ring has no first node, so there are two passes: an open path once round the ring, from the
far side, finds the node at position 0; then the path is made to start and end in it. An open path over half the ring
would save a quarter of the time and cost 0.7% of squared error (3 bits): choices of far positions matter long after.

Why so many plain steps: difference, square, sum and minimum are each rounded once, or not at all, by IEEE 754. So a
tile's path depends on the tile alone: not on the tiles beside it, the number of threads, vector instructions, or the
device. A fused multiply-add would save a fifth of the time and this guarantee.

Speed is that of the L2 cache: a step is four passes over 65,536 float32 for every tile, 30 to 45 microseconds on one
core (benchmarks/exl3.py). Up to 5 bits there is a second form for CPUs, asked for by `compiled`: torch.compile makes one
pass without memory of all four, 2.3 times as fast, where a C++ compiler is at hand. The generated code computes the same
sums, and is compiled with floating-point contraction off, so the paths are the same; the plain form is the reference.

Agrees with the values of GPTQModel 7.7.0's decoder, which sums in float32 what exllamav3's kernels round to float16, as
here. Shape suffixes: S words, V nodes, B tiles, L positions.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

WORD_BITS = 16
# More bits are no faster compiled: there are more edges into a node than a compiler unrolls well.
MOST_COMPILED_BITS = 5
TILE = 256
# exllamav3 stores the multiplier of these two with each module, as the mark of its codebook; the first has none.
CODEBOOKS = ("3inst", "mcg", "mul1")
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
_ADDED_BY_3INST = 64248484
# Tiles whose costs are held at once, and tiles of one step. Neither changes a path.
TILES_AT_ONCE = {"cpu": 8, "cuda": 128}


def codebook(name: str) -> Tensor:
    """float32 [65536]: the value of every word, rounded to float16 as exllamav3's kernels do; KeyError for another name."""
    words_S = torch.arange(1 << WORD_BITS, dtype=torch.int64)
    mixed_S = (words_S * MULTIPLIERS[name] + (_ADDED_BY_3INST if name == "3inst" else 0)) & 0xFFFFFFFF
    if name == "mul1":
        # 1024 + the sum of the four bytes, which as a float16 has the unit 1, then scaled and shifted.
        bytes_S4 = mixed_S[:, None] >> torch.tensor([0, 8, 16, 24]) & 0xFF
        return ((bytes_S4.sum(dim=1) + 1024).float() * _half(0x1EEE) + _half(0xC931)).half().float()
    # Sign and the lower twelve bits at random, the upper exponent bits fixed: two float16 below 2, added.
    mixed_S = 0x3B603B60 ^ (mixed_S & 0x8FFF8FFF)
    halves_S = [((mixed_S >> shift) & 0xFFFF).to(torch.uint16).view(torch.float16).float() for shift in (0, 16)]
    return (halves_S[0] + halves_S[1]).half().float()


def _half(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.uint16).view(torch.float16))


class Trellis:
    """All closed paths of one code, and the search for the one nearest to a tile.

    `values_S` float32, a power of two of them, on the device that searches; `bits` per position, at most half of a word's.
    Keeps buffers between calls, so it is for one thread at a time. `compiled` finds the same paths sooner, on a CPU and up
    to MOST_COMPILED_BITS; elsewhere it changes nothing.
    """

    def __init__(self, values_S: Tensor, bits: int, compiled: bool = False) -> None:
        self.values_S = values_S
        self.bits = bits
        self.word_bits = len(values_S).bit_length() - 1
        assert 1 << self.word_bits == len(values_S) and 0 < 2 * bits <= self.word_bits
        self.node_bits = self.word_bits - bits
        self.nodes = 1 << self.node_bits
        # A word is [oldest symbol, what is between, newest symbol]: [k, m, s]. Edges into a node differ in k alone.
        self._k, self._m = 1 << bits, 1 << (self.node_bits - bits)
        values_kms = values_S.reshape(self._k, self._m, self._k)
        # A node's cost is the same for every s. It is added along the longer of the other two, and rows stay whole.
        self._is_turned = self._m >= self._k
        self._values = values_kms.transpose(1, 2).contiguous() if self._is_turned else values_kms
        self._is_compiled = (
            compiled and self._is_turned and bits <= MOST_COMPILED_BITS and values_S.device.type == "cpu"
        )
        self._edges: Tensor | None = None
        self._best: Tensor | None = None
        self._costs: Tensor | None = None

    def search(self, tiles_BL: Tensor) -> Tensor:
        """int64 [B, L]: the word at each position of the nearest closed path found for each tile of float32 values.

        Closed: the upper bits of each word are the lower bits of the one before, the last one being before the first.
        The best of the paths through the node that the first pass chose; whether another node had a better one is not
        known, as with every two-pass search. L is at least one word's bits: a shorter ring would meet itself.
        """
        assert tiles_BL.shape[1] * self.bits >= self.word_bits
        device = self.values_S.device
        at_once = TILES_AT_ONCE.get(device.type, TILES_AT_ONCE["cuda"])
        tiles_BL = tiles_BL.to(device=device, dtype=torch.float32)
        if not len(tiles_BL):
            return torch.empty(tiles_BL.shape, dtype=torch.int64, device=device)
        if not self._is_compiled:
            return torch.cat([self._search_some(some_BL.t().contiguous()) for some_BL in tiles_BL.split(at_once)])
        # Code is compiled for one shape: the last ones are filled up.
        filled_BL = torch.cat([tiles_BL, tiles_BL.new_zeros(-len(tiles_BL) % at_once, tiles_BL.shape[1])])
        found = [self._search_some(some_BL.t().contiguous()) for some_BL in filled_BL.split(at_once)]
        return torch.cat(found)[: len(tiles_BL)]

    def decode(self, words: Tensor) -> Tensor:
        """float32, of the words' shape: their values."""
        return self.values_S[words]

    def _search_some(self, tiles_LB: Tensor) -> Tensor:
        half = len(tiles_LB) // 2
        turned_LB = tiles_LB.roll(half, dims=0)
        costs_LBV = self._forward(turned_LB, None)
        start_B = self._trace(turned_LB, costs_LBV, costs_LBV[-1].argmin(dim=1), half)[0] >> self.bits
        costs_LBV = self._forward(tiles_LB, start_B)
        return self._trace(tiles_LB, costs_LBV, start_B, 0).t()

    def _forward(self, tiles_LB: Tensor, start_B: Tensor | None) -> Tensor:
        """Least cost of every node before each position and after the last, [L + 1, B, V]; a buffer of this object's."""
        length, tiles = tiles_LB.shape
        costs_LBV = self._buffer(length, tiles)
        if start_B is None:
            costs_LBV[0] = 0.0
        else:
            costs_LBV[0] = torch.inf
            costs_LBV[0].scatter_(1, start_B[:, None], 0.0)
        if self._is_compiled:
            self._advance_compiled(tiles_LB, costs_LBV)
            return costs_LBV
        assert self._edges is not None
        for first in range(0, tiles, len(self._edges)):
            self._advance(tiles_LB[:, first : first + len(self._edges)], costs_LBV[:, first : first + len(self._edges)])
        return costs_LBV

    def _advance(self, tiles_LB: Tensor, costs_LBV: Tensor) -> None:
        """All steps of the tiles that fit into the buffer of edges."""
        tiles = tiles_LB.shape[1]
        assert self._edges is not None and self._best is not None
        edges, best = self._edges[:tiles], self._best[:tiles]
        shape = (tiles, self._k, 1, self._m) if self._is_turned else (tiles, self._k, self._m, 1)
        # Views of all steps at once: one by one they would take as long as a pass.
        before = costs_LBV[:-1].unflatten(2, shape[1:]).unbind()
        after = costs_LBV[1:].unflatten(2, (self._m, self._k)).unbind()
        for value, least, costs in zip(tiles_LB[:, :, None, None, None].unbind(), before, after, strict=True):
            torch.sub(self._values, value, out=edges)
            torch.mul(edges, edges, out=edges)
            edges += least
            if self._is_turned:
                torch.amin(edges, dim=1, out=best)
                costs.copy_(best.transpose(1, 2))
            else:
                torch.amin(edges, dim=1, out=costs)

    def _advance_compiled(self, tiles_LB: Tensor, costs_LBV: Tensor) -> None:
        """The same for all tiles at once: nothing of the size of all edges is kept."""
        tiles = tiles_LB.shape[1]
        step = _compiled_step()
        before = costs_LBV[:-1].view(-1, tiles, self._k, self._m).unbind()
        after = costs_LBV[1:].view(-1, tiles, self._m, self._k).unbind()
        for value_B, least_Bkm, costs_Bms in zip(tiles_LB.unbind(), before, after, strict=True):
            costs_Bms.copy_(step(self._values, value_B, least_Bkm).transpose(1, 2))

    def _trace(self, tiles_LB: Tensor, costs_LBV: Tensor, end_B: Tensor, since: int) -> Tensor:
        """The words, from position `since` on, of the best path that ends in each tile's node, int64 [L - since, B].

        Of equally good edges the first.
        """
        words: list[Tensor] = []
        oldest_k = torch.arange(self._k, device=tiles_LB.device) << self.node_bits
        node_B1 = end_B[:, None]
        for i in range(len(tiles_LB) - 1, since - 1, -1):
            words_Bk = node_B1 + oldest_k
            before_Bk = words_Bk >> self.bits
            # The sums of the way forward, for these edges only.
            edges_Bk = (self.values_S[words_Bk] - tiles_LB[i][:, None]).square_() + costs_LBV[i].gather(1, before_Bk)
            best_B1 = edges_Bk.argmin(dim=1, keepdim=True)
            words.append(words_Bk.gather(1, best_B1))
            node_B1 = words[-1] >> self.bits
        return torch.cat(words[::-1], dim=1).t()

    def _buffer(self, length: int, tiles: int) -> Tensor:
        needed = (length + 1) * tiles * self.nodes
        if self._costs is None or self._costs.numel() < needed:
            self._costs = torch.empty(needed, dtype=torch.float32, device=self.values_S.device)
        if self._edges is None and not self._is_compiled:
            # One tile per thread stays in its core's cache; a GPU takes all at once.
            at_once = torch.get_num_threads() if self.values_S.device.type == "cpu" else TILES_AT_ONCE["cuda"]
            self._edges = torch.empty(at_once, *self._values.shape, device=self.values_S.device)
            self._best = torch.empty(at_once, self._k, self._m, device=self.values_S.device)
        return self._costs[:needed].view(length + 1, tiles, self.nodes)


def _step(values_ksm: Tensor, value_B: Tensor, least_Bkm: Tensor) -> Tensor:
    """Least costs [B, s, m] of the nodes after a position, as `_advance` computes them; unrolled, to be compiled."""
    best_Bsm = (values_ksm[0] - value_B[:, None, None]).square() + least_Bkm[:, 0, None]
    for k in range(1, len(values_ksm)):
        edges_Bsm = (values_ksm[k] - value_B[:, None, None]).square() + least_Bkm[:, k, None]
        best_Bsm = torch.minimum(best_Bsm, edges_Bsm)
    return best_Bsm


@cache
def _compiled_step() -> Any:
    return torch.compile(_step, dynamic=False)
