"""Prompts of the command line, for tokenizers whose documents begin with a token."""

from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_interp.prompt import encoded, one_token


class Letters:
    end_of_document = 98
    begin_of_document = 99

    def encode(self, text):
        return np.array([ord(letter) - ord("a") for letter in text], dtype=np.int64)

    def decode(self, ids):
        return "".join(chr(ord("a") + number) for number in ids)


SESSION = SimpleNamespace(tokenizer=Letters())


def test_a_prompt_begins_as_a_document_and_an_answer_does_not():
    assert encoded(SESSION, "--prompt", "ab") == [99, 0, 1]
    assert one_token(SESSION, "--answers", "b") == 1


def test_what_has_no_token_or_too_many_is_refused():
    with pytest.raises(ConfigError, match="--prompt: it has no token"):
        encoded(SESSION, "--prompt", "")
    with pytest.raises(ConfigError, match=r"--answers 'ab': is 2 tokens, and must be one: \['a', 'b'\]"):
        one_token(SESSION, "--answers", "ab")
