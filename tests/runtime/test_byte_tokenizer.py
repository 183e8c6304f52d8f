"""The tokenizer of the dry run, and how little its imports cost."""

import subprocess
import sys

import pytest

from mini_infer.runtime.byte_tokenizer import ByteTokenizer


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("h\xe9") == [0x68, 0xC3, 0xA9]
    ids = tokenizer.encode("<|im_start|>a<|eos|><|im_end|>b<|bos|>", add_special_tokens=False)
    assert ids == [258, 0x61, 257, 259, 0x62, 256]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>a<|eos|><|im_end|>b<|bos|>"
    )
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert (tokenizer.vocab_size, tokenizer.token_bytes(260), tokenizer.token_bytes(-1)) == (
        260,
        b"",
        b"",
    )


def test_byte_tokenizer_writes_chatml() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    tokenizer = ByteTokenizer()
    prompt = tokenizer.apply_chat_template(messages, documents=[{}])
    assert prompt == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    )
    assert tokenizer.encode(prompt, add_special_tokens=False)[0] == 258


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("byte_tokenizer input_processor output_processor", "jinja2 tokenizers torch numpy"),
        ("tokenizer chat_template", "transformers torch numpy"),
    ],
)
def test_imports_stay_light(modules: str, absent: str) -> None:
    code = "\n".join(
        [
            *(f"import mini_infer.runtime.{module}" for module in modules.split()),
            "import sys",
            f"print([name for name in {absent.split()} if name in sys.modules])",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_tools_and_calls_are_part_of_a_conversation() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": "é"}'}}
    prompt = ByteTokenizer().apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        add_generation_prompt=False,
    )
    assert prompt.startswith(
        '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>\n'
    )
    assert prompt.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
    )
