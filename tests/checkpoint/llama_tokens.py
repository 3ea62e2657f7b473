"""Program: tokenises texts (a JSON list on stdin) with llama.cpp and the vocabulary of a GGUF file; prints the ids."""

import json
import sys
import urllib.request

import xllamacpp


def main(model: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    ids = []
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            ids.append(json.load(answer)["tokens"])
    print(json.dumps(ids))


if __name__ == "__main__":
    main(sys.argv[1])
