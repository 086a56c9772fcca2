"""mixmesh export"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .output import Json, print_json, size, working

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]B)", re.IGNORECASE)
UNIT_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
CONFIG_FILES = "config.json", "generation_config.json"
DEFAULT_SHARD_SIZE = "50GB"


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, or the folder of a run: its newest good one."
        ),
    ],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="A folder that from_pretrained can load, or a file NAME.safetensors.",
        ),
    ],
    max_shard_size: Annotated[
        str,
        typer.Option("--max-shard-size", metavar="SIZE", help="Larger weights become several files."),
    ] = DEFAULT_SHARD_SIZE,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Write the optimizer's state too, by parameter name.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FROM",
            help="Take config.json from a folder, a file, or a job's model, not from the checkpoint.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    as_json: Json = False,
) -> None:
    """Write the weights of a checkpoint as safetensors, as save_pretrained of transformers does."""
    max_shard_bytes = parse_size(max_shard_size)
    from ..checkpoint import export as write

    with working("checking the checkpoint") as say:
        written = write(
            checkpoint,
            to,
            max_shard_bytes=max_shard_bytes,
            optimizer=optimizer,
            config=None if config is None else config_files(config),
            force=force,
            progress=say,
        )
    if as_json:
        print_json(
            {
                "checkpoint": str(written.checkpoint),
                "step": written.step,
                "files": [str(path) for path in written.files],
                "num_tensors": written.num_tensors,
                "size_bytes": written.size_bytes,
                "has_config": written.has_config,
            }
        )
        return
    print(
        f"{written.num_tensors} tensors, {size(written.size_bytes)}, "
        f"of {written.checkpoint} (step {written.step})"
    )
    for path in written.files:
        print(f"  {path}")
    if not written.has_config:
        print("there is no config.json, which from_pretrained needs: --config FROM takes it from elsewhere")


def parse_size(text: str) -> int:
    """Converts ``5GB`` to bytes: 5e9, as in transformers. Raises InputError for other text."""
    match = SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * UNIT_BYTES[match[2].upper()]) if match else 0
    if not size_bytes:
        raise InputError(
            "the largest size of a file cannot be read",
            expected="a number with KB, MB, GB or TB",
            got=f"--max-shard-size {text}",
            hint="--max-shard-size 5GB",
        )
    return size_bytes


def config_files(text: str) -> dict[str, str]:
    """The contents of ``config.json`` and similar files, by name. ``text`` is their folder, the file, or a
    job whose model is one of transformers. Raises InputError if there are none."""
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        places = [path / name for name in CONFIG_FILES] if path.is_dir() else [path]
        names = CONFIG_FILES if path.is_dir() else CONFIG_FILES[:1]
        try:
            texts = {n: p.read_text(encoding="utf-8") for n, p in zip(names, places) if p.is_file()}
            for each in texts.values():
                json.loads(each)
        except (OSError, ValueError) as error:
            raise InputError(
                "the config cannot be read",
                expected="JSON, as save_pretrained writes it",
                got=str(error),
                where=text,
            ) from None
    else:
        from ..checkpoint.pretrained import pretrained_files
        from ..frontend.job import load_job

        texts = pretrained_files(load_job(text).model)
    if CONFIG_FILES[0] not in texts:
        raise InputError(
            "there is no config",
            expected="a folder with config.json, the file, or a job whose model is one of transformers",
            got=text,
            where="--config",
        )
    return texts
