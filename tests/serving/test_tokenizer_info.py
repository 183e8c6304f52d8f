"""/tokenizer_info, which clients without a tokenizer ask."""

from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from tests.serving.live import LiveServer


def test_clients_without_a_tokenizer_learn_of_the_servers(server: LiveServer) -> None:
    answer = server.client.get("/tokenizer_info").json()
    assert (answer["bos_token"], answer["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert answer["vocab_size"] == ByteTokenizer.vocab_size
    assert answer["chat_template"] is None, "the dry run has no template, only code"
