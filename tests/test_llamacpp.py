"""llama.cpp runs what the flow exports, and says what the dense model of the same weights says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from flows.demo_model import demo_model
from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model, generate
from tasks.output_directory import GGUF_FILE
from tasks.quantization import GGUFConfig
from tests.flow_jobs import tiny_job
from tests.llamacpp import ask_llamacpp
from tests.tiny_models import TEXTS, write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

# It rounds activations to 8 bits before every product: log-probabilities differ by some hundredths, on a random model more.
LOG_PROBABILITY_TOLERANCE = 0.25
PROSE = (
    "The capital of France is",
    "The Rabbit took a watch out of its pocket, and",
    "Water boils at a temperature of",
    "Once upon a time there was a king who had three",
)
STEPS = 12


@pytest.mark.parametrize(
    "config", [GGUFConfig(), GGUFConfig(imatrix=True), GGUFConfig(quant_type="q8_0")], ids=["mix", "imatrix", "q8_0"]
)
def test_llamacpp_computes_what_the_file_of_a_tiny_model_holds(config: GGUFConfig, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", hidden_size=256, intermediate_size=512, tied=True)
    job = tiny_job(source, tmp_path, quantization=config, devices=("cpu", "cpu"))
    quantize_model(job)
    tokenizer, model = AutoTokenizer.from_pretrained(source), dense_model(job.output)
    prompts = [text[: len(text) - cut] for text in TEXTS for cut in (0, 7, 19)]
    answers = ask_llamacpp(tmp_path, Path(job.output) / GGUF_FILE, prompts)
    told = 0
    for text, answer in zip(prompts, answers, strict=True):
        ids_1T = tokenizer(text, return_tensors="pt").input_ids
        assert answer["tokens"] == ids_1T.shape[1]
        if not answer["steps"]:  # the next token ends within a character
            continue
        with torch.no_grad():
            expected_V = model(ids_1T).logits[0, -1].log_softmax(dim=0)
        theirs = {int(token): value for token, value in answer["steps"][0].items()}
        for token, value in theirs.items():
            assert value == pytest.approx(float(expected_V[token]), abs=LOG_PROBABILITY_TOLERANCE)
        first, second = expected_V.topk(2).values
        if first - second >= LOG_PROBABILITY_TOLERANCE:
            assert max(theirs, key=theirs.__getitem__) == int(expected_V.argmax())
            told += 1
    assert told >= 3


def test_llamacpp_goes_on_with_the_words_of_the_dense_model_on_smollm2(tmp_path: Path) -> None:
    source = demo_model(print)
    job = tiny_job(source, tmp_path, quantization=GGUFConfig(), devices=("cpu", "cpu"))
    quantize_model(job)
    tokenizer, model = AutoTokenizer.from_pretrained(source), dense_model(job.output)
    answers = ask_llamacpp(tmp_path, Path(job.output) / GGUF_FILE, list(PROSE), steps=STEPS)
    agreed = 0
    for prompt, answer in zip(PROSE, answers, strict=True):
        ids = tokenizer(prompt).input_ids
        assert answer["tokens"] == len(ids) and len(answer["steps"]) == STEPS
        chosen = [int(max(step, key=step.__getitem__)) for step in answer["steps"]]
        if tokenizer.eos_token_id in chosen:  # where the dense model's text ends
            chosen = chosen[: chosen.index(tokenizer.eos_token_id)]
        with torch.no_grad():
            logits_TV = model(torch.tensor([ids + chosen])).logits[0, len(ids) - 1 : -1]
        # The same token at every step, but for those that the dense model hardly tells apart.
        lost_T = logits_TV.amax(dim=1) - logits_TV.gather(1, torch.tensor(chosen)[:, None])[:, 0]
        assert float(lost_T.max()) < LOG_PROBABILITY_TOLERANCE
        agreed += tokenizer.decode(chosen) == generate(model, tokenizer, prompt, tokens=STEPS)
    assert agreed >= len(PROSE) - 1
