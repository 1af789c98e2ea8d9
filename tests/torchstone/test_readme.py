"""What the README says exists: commands, options, settings, make targets, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from torchstone.cli import app
from torchstone.settings import Settings
from torchstone.specs import parse_spec

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def setting_row(name: str) -> str:
    """The row of the settings table that a field's own default and description give."""
    field = Settings.model_fields[name]
    default = "" if field.default in (None, "") else f"`{field.default}`"
    described = field.description or ", ".join(get_args(field.annotation))
    return f"| `TORCHSTONE_{name.upper()}` | {default} | {described} |"


def test_the_settings_table_is_what_the_settings_say() -> None:
    written = [line for line in README.splitlines() if line.startswith("| `TORCHSTONE_")]
    expected = [setting_row(name) for name in Settings.model_fields]
    assert written == expected, "the table should be:\n" + "\n".join(expected)


def test_every_variable_that_the_docs_name_is_a_setting() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "docker-compose.yml"):
        for name in re.findall(r"TORCHSTONE_([A-Z_]*[A-Z])", path.read_text(encoding="utf-8")):
            assert name.lower() in Settings.model_fields, f"{path.name}: TORCHSTONE_{name}"


def test_every_command_and_option_that_the_readme_names_exists_and_none_is_left_out() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    named = set()
    for line in README.splitlines():
        for command, rest in re.findall(r"torchstone (\w+)([^`|#]*)", line):
            if command not in commands:
                continue
            named.add(command)
            options = {option for parameter in commands[command].params for option in parameter.opts}
            table = re.match(r"\| `torchstone \w+", line) is not None
            for option in re.findall(r"--[a-z-]+", line if table and line.count("`torchstone") == 1 else rest):
                assert option in options, f"torchstone {command} {option}"
    assert named == set(commands)


@pytest.mark.parametrize("target", re.findall(r"^\| `make ([\w-]+)`", README, flags=re.MULTILINE))
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_every_file_that_the_readme_links_exists() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_spec_in_the_readme_is_accepted() -> None:
    begins = [found.start() for found in re.finditer(r'\{\s*"kind"', README)]
    assert len(begins) >= 3
    for begin in begins:
        spec, _ = json.JSONDecoder().raw_decode(README[begin:])
        parse_spec(spec)
