"""``mini-infer train-draft``: a head that drafts for a model, made from the model's own words."""

from pathlib import Path

import click

from mini_infer.core.engine_config import DEFAULT_MODEL
from mini_infer.core.errors import InvalidConfigError

FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("train-draft")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="The target, as serve's.")
@click.option("--output", required=True, type=FOLDER, help="Folder that the head is written to.")
@click.option(
    "--prompts",
    type=FILE,
    default=None,
    help="JSON Lines with messages, turns or a prompt each; by default the model makes some up.",
)
@click.option("--num-tokens", default=200_000, show_default=True, help="Answers, in tokens.")
@click.option("--max-length", default=512, show_default=True, help="Longest text, in tokens.")
@click.option("--epochs", default=4, show_default=True, help="Passes over the texts.")
@click.option("--learning-rate", default=1e-3, show_default=True, help="AdamW's, at its highest.")
@click.option("--depth", default=4, show_default=True, help="Drafts in a row that it learns.")
@click.option(
    "--num-draft-tokens", default=16384, show_default=True, help="Vocabulary that is drafted from."
)
@click.option(
    "--num-layers", default=1, show_default=True, help="Of the head: a draft is better, and dearer."
)
@click.option(
    "--parallel/--sequential",
    default=False,
    show_default=True,
    help="All drafts of a step in one pass: right less often, and cheaper.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=None, help="[default: auto]")
@click.option("--seed", default=0, show_default=True, help="Of the texts and of training.")
def train_draft(
    model: str,
    output: Path,
    prompts: Path | None,
    num_tokens: int,
    max_length: int,
    epochs: int,
    learning_rate: float,
    depth: int,
    num_draft_tokens: int,
    num_layers: int,
    parallel: bool,
    device: str | None,
    seed: int,
) -> None:
    """Train a head that drafts for MODEL, from text that the model generates itself.

    Afterwards: mini-infer serve --speculative-config '{"method": "head", "model": "FOLDER"}'
    """
    if num_tokens < 1:
        raise InvalidConfigError(f"num_tokens must be 1 or more, got {num_tokens}")
    # Hidden ones do not count: a training that was killed as it wrote its head may leave some.
    files = {file.name for file in output.glob("[!.]*")}
    if files and "training.json" not in files:
        raise InvalidConfigError(
            f"{output} holds other files: name a new folder, or that of an earlier head"
        )
    from mini_infer.runtime.train_draft import train

    options: dict[str, object] = {"model": model, "max_model_len": max_length, "seed": seed}
    if device is not None:
        options["device"] = device
    training = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "depth": depth,
        "num_draft_tokens": num_draft_tokens,
        "num_layers": num_layers,
        "parallel": parallel,
        "seed": seed,
    }
    record = train(output, options, training, num_tokens, prompts)
    seconds = ", ".join(f"{phase} {time:.0f} s" for phase, time in record.seconds.items())
    click.echo(f"{record.num_tokens} tokens of {record.num_texts} texts: {seconds}")
    for epoch, acceptance in enumerate(record.held_out):
        drafts = ", ".join(f"{share:.1%}" for share in acceptance.by_depth)
        click.echo(
            f"epoch {epoch}: held-out acceptance {acceptance.rate:.1%} with {depth} drafts a step; "
            f"by place {drafts}"
        )
    click.echo(output)
