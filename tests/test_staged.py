"""The paused forward: bit for bit the plain one, each linear once, and nothing left behind by an error."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import write_tiny_llama
from torch import nn

from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
from tasks.models.staged import StagedForward

LENGTHS = ((12, 12), (9, 4), (1, 1), (20, 3), (12, 7))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    path = write_tiny_llama(tmp_path_factory.mktemp("staged") / "model", attention_bias=True, mlp_bias=True)
    return Decoder.from_source(SourceModel.open(str(path)))


def calls_of(decoder: Decoder, lengths=LENGTHS):
    """One padded batch of two samples for each pair of lengths."""
    generator = torch.Generator().manual_seed(2)
    for pair in lengths:
        hidden = torch.randn(2, max(pair), 64, generator=generator)
        mask = torch.arange(max(pair))[None] < torch.tensor(pair)[:, None]
        yield hidden, decoder.call_arguments(0, hidden, mask)


@torch.no_grad()
def plain(layer: nn.Module, calls) -> list[torch.Tensor]:
    return [layer(hidden, **arguments) for hidden, arguments in calls]


def run_through(layer, subsets, calls, at_subset=lambda subset, inputs: None) -> list[torch.Tensor]:
    with StagedForward(layer, subsets, calls) as staged:
        for subset in subsets:
            at_subset(subset, dict(staged.advance(subset)))
        return staged.finish()


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_with_unchanged_weights_it_is_bit_identical_to_the_plain_forward(decoder):
    layer = decoder.materialise(0, "cpu")
    assert_same(run_through(layer, decoder.subsets(0), calls_of(decoder)), plain(layer, calls_of(decoder)))


def test_with_rewinding_it_is_bit_identical_too_with_one_call_in_the_layer_at_a_time(decoder):
    layer, changed = decoder.materialise(0, "cpu"), decoder.materialise(0, "cpu")
    subsets, alive, most = decoder.subsets(0), weakref.WeakSet(), 0

    class Calls:
        def __iter__(self):
            nonlocal most
            for hidden, arguments in calls_of(decoder):
                hidden = hidden.clone()
                alive.add(hidden)
                most = max(most, len(alive))
                yield hidden, arguments
                del hidden, arguments

    def halve(module):
        return lambda subset, inputs: [module.get_submodule(name).weight.data.mul_(0.5) for name in subset]

    with StagedForward(changed, subsets, Calls(), rewinds=True) as staged:
        for subset in subsets:
            seen = 0
            for _ in staged.advance(subset):
                seen += 1
            assert seen == len(LENGTHS)
            halve(changed)(subset, None)
        outputs = list(staged.outputs())
    assert most == 1
    assert_same(outputs, run_through(layer, subsets, calls_of(decoder), halve(layer)))


def test_every_linear_runs_once_per_call_and_gets_the_input_that_was_shown(decoder):
    layer = decoder.materialise(0, "cpu")
    got: dict[str, list[torch.Tensor]] = {name: [] for name in decoder.linear_shapes(0)}
    for name in got:
        layer.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: got[name].append(args[0]))
    shown = {}
    run_through(layer, decoder.subsets(0), calls_of(decoder), lambda subset, inputs: shown.update({subset: inputs}))
    for subset, inputs in shown.items():
        for name in subset:
            assert len(got[name]) == len(inputs) == len(LENGTHS)
            assert all(got[name][index] is input_BTK for index, input_BTK in inputs.items())


def test_later_subsets_see_the_changed_weights_of_earlier_ones(decoder):
    """Rounded q, k, v: the input of o must be what a layer rounded from the start computes there, and so on."""
    layer, rounded = decoder.materialise(0, "cpu"), decoder.materialise(0, "cpu")
    expected: dict[str, list[torch.Tensor]] = {}

    def round_weights(subset, inputs):
        for name in subset:
            weight = layer.get_submodule(name).weight
            weight.copy_(weight.mul(8).round().div(8))
        assert_same(list(inputs.values()), expected[subset[0]])

    for subset in decoder.subsets(0):
        for name in subset:
            linear = rounded.get_submodule(name)
            linear.weight.copy_(linear.weight.mul(8).round().div(8))
            expected[name] = []
            linear.register_forward_pre_hook(lambda _, args, name=name: expected[name].append(args[0]))
    outputs = plain(rounded, calls_of(decoder))
    assert_same(run_through(layer, decoder.subsets(0), calls_of(decoder), round_weights), outputs)


def test_modules_in_no_subset_run_through(decoder):
    layer = decoder.materialise(0, "cpu")
    subsets = (("self_attn.k_proj",), ("mlp.down_proj",))
    shown = []
    outputs = run_through(layer, subsets, calls_of(decoder), lambda subset, inputs: shown.append(len(inputs)))
    assert shown == [len(LENGTHS)] * 2
    assert_same(outputs, plain(layer, calls_of(decoder)))
    assert_same(run_through(layer, (), calls_of(decoder)), plain(layer, calls_of(decoder)))


def test_a_call_that_does_not_reach_a_subset_shows_nothing_there():
    class Routed(nn.Module):
        """Positive inputs go to one expert, negative ones to the other; zeros to none."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            if x.sum() > 0:
                x = self.first(x)
            elif x.sum() < 0:
                x = self.second(x)
            return self.last(x)

    layer = Routed().requires_grad_(False)
    calls = [(torch.full((1, 2, 4), value), {}) for value in (1.0, -1.0, 0.0, 2.0)]
    shown = {}
    subsets = (("first",), ("second",), ("last",))
    outputs = run_through(layer, subsets, calls, lambda subset, inputs: shown.update({subset[0]: sorted(inputs)}))
    assert shown == {"first": [0, 3], "second": [1], "last": [0, 1, 2, 3]}
    assert_same(outputs, plain(layer, calls))


def test_calls_are_taken_one_by_one_and_each_input_is_shown_as_it_arrives(decoder):
    layer = decoder.materialise(0, "cpu")
    taken = []

    def counted():
        for index, call in enumerate(calls_of(decoder)):
            taken.append(index)
            yield call

    with StagedForward(layer, decoder.subsets(0), counted()) as staged:
        for index, _ in staged.advance(decoder.subsets(0)[0]):
            assert taken == list(range(index + 1))


def test_threads_with_layers_and_batches_of_their_own_give_the_same_bytes(decoder):
    layer = decoder.materialise(0, "cpu")
    expected = plain(layer, calls_of(decoder))
    barrier = threading.Barrier(2, timeout=60)

    def lane(number: int) -> list[torch.Tensor]:
        own = decoder.materialise(0, "cpu")
        calls = list(calls_of(decoder))[number::2]
        return run_through(own, decoder.subsets(0), calls, lambda subset, inputs: barrier.wait())

    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            even, odd = pool.map(lane, range(2))
            assert_same(even, expected[0::2])
            assert_same(odd, expected[1::2])


def tensors_alive(shape: tuple[int, ...]) -> int:
    gc.collect()
    return sum(type(found) is torch.Tensor and found.shape == shape for found in gc.get_objects())


def test_an_error_frees_what_the_paused_forwards_held_and_leaves_the_layer_usable(decoder):
    layer = decoder.materialise(0, "cpu")
    lengths = ((11, 11), (11, 11))  # a shape of its own, to be counted
    expected = plain(layer, calls_of(decoder, lengths))
    held = []

    def fail(subset, inputs):
        held.extend(weakref.ref(input_BTK) for input_BTK in inputs.values())
        inputs.clear()
        if subset == decoder.subsets(0)[2]:
            assert tensors_alive((2, 11, 64)) > 2
            raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="on fire"):
        run_through(layer, decoder.subsets(0), calls_of(decoder, lengths), fail)
    gc.collect()
    assert len(held) == 6 and all(reference() is None for reference in held)
    assert tensors_alive((2, 11, 64)) == len(expected)
    assert_same(plain(layer, calls_of(decoder, lengths)), expected)
    assert_same(run_through(layer, decoder.subsets(0), calls_of(decoder, lengths)), expected)


def test_an_error_inside_the_layer_reaches_the_caller_and_frees_the_rest(decoder):
    layer = decoder.materialise(0, "cpu")
    calls = [*calls_of(decoder, LENGTHS[:2]), (torch.zeros(1, 3, 63), {})]
    with pytest.raises(RuntimeError), StagedForward(layer, decoder.subsets(0), calls) as staged:
        for _ in staged.advance(decoder.subsets(0)[0]):
            pass
    assert "forward" not in layer.mlp.up_proj.__dict__
    assert_same(run_through(layer, decoder.subsets(0), calls[:2]), plain(layer, calls[:2]))


def test_leaving_before_the_end_or_before_the_start_frees_everything(decoder):
    layer = decoder.materialise(0, "cpu")
    with StagedForward(layer, decoder.subsets(0), calls_of(decoder)) as staged:
        next(iter(staged.advance(decoder.subsets(0)[0])))
    with StagedForward(layer, decoder.subsets(0), calls_of(decoder)):
        pass
    assert_same(run_through(layer, decoder.subsets(0), calls_of(decoder)), plain(layer, calls_of(decoder)))


def test_grad_mode_of_the_caller_is_untouched_between_switches(decoder):
    layer = decoder.materialise(0, "cpu").requires_grad_(True)
    with torch.enable_grad(), StagedForward(layer, decoder.subsets(0), calls_of(decoder)) as staged:
        for _, input_BTK in staged.advance(decoder.subsets(0)[0]):
            assert torch.is_grad_enabled() and not input_BTK.requires_grad
        assert not any(output.requires_grad for output in staged.finish())


def test_subsets_are_taken_in_their_order(decoder):
    layer = decoder.materialise(0, "cpu")
    with StagedForward(layer, decoder.subsets(0), calls_of(decoder)) as staged:
        with pytest.raises(ValueError, match="is not one of the subsets"):
            next(staged.advance(("self_attn.q_proj",)))
        for _ in staged.advance(decoder.subsets(0)[1]):
            pass
        with pytest.raises(RuntimeError, match="is already past"):
            next(staged.advance(decoder.subsets(0)[0]))


def test_another_thread_is_refused(decoder):
    layer = decoder.materialise(0, "cpu")
    with StagedForward(layer, decoder.subsets(0), calls_of(decoder)) as staged, ThreadPoolExecutor(1) as pool:
        finished = pool.submit(staged.finish)
        assert "the thread that entered it" in str(finished.exception())
