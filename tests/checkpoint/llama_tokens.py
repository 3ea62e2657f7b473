"""Program: llama.cpp on a GGUF file. Texts of a JSON list on stdin are tokenised, a list of ids is continued greedily.

Prints the ids of each; `python llama_tokens.py FILE NUM_TOKENS`.
"""

import json
import sys
import urllib.request
from typing import Any

import xllamacpp


def main(model: str, num_tokens: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    ids = []
    for asked in json.load(sys.stdin):
        if isinstance(asked, str):
            fields = {"content": asked, "add_special": True, "parse_special": True}
            ids.append(post(server, "tokenize", fields)["tokens"])
        else:
            fields = {"prompt": asked, "n_predict": num_tokens, "temperature": 0, "return_tokens": True}
            ids.append(post(server, "completion", fields | {"ignore_eos": True})["tokens"])
    print(json.dumps(ids))


def post(server: xllamacpp.Server, name: str, fields: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{server.listening_address}/{name}", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
