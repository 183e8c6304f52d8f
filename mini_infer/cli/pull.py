"""``mini-infer pull``: fetch a model once."""

import click


@click.command()
@click.argument("model")
def pull(model: str) -> None:
    """Fetch MODEL (an alias or a hub id) and print its folder as the last line.

    The folder is in Hugging Face format: config.json, tokenizer files and safetensors.
    """
    from mini_infer.modeling.pull import pull as pull_model

    click.echo(pull_model(model))
