"""Run by an interpreter that has xllamacpp: one request per line of JSON in, one answer per line out.

A request names a `model` file and `prompts`, each a text or a list of token ids; the answer has for each the number of
tokens it became and, for each of `steps` greedy steps, the most likely tokens with their log-probabilities; none for
steps that end within a character, which llama.cpp doesn't tell of.
"""

import json
import sys
from typing import Any

import xllamacpp


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = 256, 1, 0, False
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    answers = []
    for prompt in request["prompts"]:
        wish = {"prompt": prompt, "max_tokens": request["steps"], "temperature": 0, "n_probs": 10, "ignore_eos": True}
        done = server.handle_completions(wish)
        steps = [
            {top["id"]: top["logprob"] for top in step["top_logprobs"]}
            for step in (done["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        answers.append({"tokens": done["usage"]["prompt_tokens"], "steps": steps})
    return answers


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    with open(sys.argv[2], "w", encoding="utf-8") as file:  # llama.cpp logs to both of its streams
        json.dump(answer(request), file)
