"""A process for test_optimised_python.py: prints the answers to bad requests as JSON."""

from __future__ import annotations

import json
import sys

from tests.support.security.real_server import CHAT, TEXT, RealServer, running, whole_body

BODIES = [
    *({name: value} for name in ("n", "max_tokens", "temperature", "logprobs", "stop", "seed",
                                 "logit_bias", "prompt", "top_k", "stop_token_ids", "min_tokens")
      for value in (0, -1, 10**9, 1e308, "1", True, [], [[]], {}, {"x": 1}, 2**63)),
    {"prompt": [-1]}, {"prompt": [4096]}, {"prompt": [5] * 3000}, {"prompt": ""}, {"echo": 1},
    {"nobody_knows": 1}, {"model": "other"}, {"response_format": {}}, {"stream_options": {}},
    {"max_tokens": 0, "echo": True, "min_tokens": 1}, {"cache_salt": ""}, {"chat_template": "x"},
]  # fmt: skip
RAW = [b"", b"{", b"[]", b"\xff", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b'"x"']


def answers_of(server: RealServer) -> list[object]:
    """Returns the interpreter's level of optimisation and [status, content of an error] of each
    request."""
    answers: list[object] = [sys.flags.optimize]
    for route in (TEXT, CHAT):
        for fields in BODIES:
            if route == CHAT and "prompt" in fields:
                fields = {"messages": fields["prompt"]}
            response = server.client.post(route, json=whole_body(route, fields))
            is_bad = response.status_code != 200
            answers.append([response.status_code, response.json() if is_bad else None])
        for raw in RAW:
            response = server.post_raw(route, raw)
            answers.append([response.status_code, response.json()])
    server.check_unharmed()
    return answers


def main() -> None:
    with running() as server:
        answers = answers_of(server)
    sys.stdout.write(json.dumps(answers))


if __name__ == "__main__":
    main()
