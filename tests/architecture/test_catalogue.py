"""The catalogue of messages and the settings are complete and documented."""

import dataclasses
import re
from collections import Counter
from types import ModuleType
from typing import Any, get_args

import pytest

from common.config.settings import Settings
from common.messages import admin, control, handoff, tokens
from tests.support.message_builders import DIRECTIONS, all_messages, fields_of, members

CONVERSATIONS = (control, handoff, tokens, admin)


def structs_of(conversation: ModuleType) -> dict[str, type]:
    """The typed structs that a conversation's file defines."""
    return {
        name: value
        for name, value in vars(conversation).items()
        if isinstance(value, type)
        and name == value.__name__
        and dataclasses.is_dataclass(value)
        and value.__module__ == conversation.__name__
    }


def messages_of(conversation: ModuleType) -> set[str]:
    unions = DIRECTIONS[conversation].values()
    return {message.__name__ for union in unions for message in members(union)}


def named_in(hint: Any) -> set[str]:  # Any: annotations have no common type
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return {hint.__name__}
    return {name for part in get_args(hint) for name in named_in(part)}


def test_the_catalogue_knows_every_conversation() -> None:
    assert set(DIRECTIONS) == set(CONVERSATIONS)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.__name__)
def test_every_union_of_a_conversation_is_in_the_catalogue(conversation: ModuleType) -> None:
    unions = {
        name for name in vars(conversation) if re.fullmatch(r"[A-Z][a-z]+To[A-Z][a-z]+", name)
    }
    assert unions == set(DIRECTIONS[conversation])


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: c.__name__)
def test_a_struct_is_a_message_of_its_conversation_or_a_part_of_one(
    conversation: ModuleType,
) -> None:
    structs = structs_of(conversation)
    parts = {n for s in structs.values() for _, hint in fields_of(s) for n in named_in(hint)}
    assert messages_of(conversation) <= set(structs), "a message belongs to one file"
    orphans = set(structs) - messages_of(conversation) - parts
    assert orphans == set(), "nobody sends them"


def test_a_message_belongs_to_exactly_one_conversation() -> None:
    counts = Counter(name for c in CONVERSATIONS for name in messages_of(c))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(all_messages()))
def test_a_message_says_who_sends_it_to_whom(name: str) -> None:
    first_line = (all_messages()[name].__doc__ or "").strip().splitlines()[0]
    sender, arrow, receiver = first_line.partition("→")
    # Both sides send an Abort, so its docstring tells what each means by it.
    assert arrow or name == "handoff.Abort"
    assert name == "handoff.Abort" or (sender.strip() and receiver.strip())


@pytest.mark.parametrize("name", sorted(all_messages()))
def test_a_message_is_frozen_slotted_and_refuses_unknown_fields(name: str) -> None:
    message = all_messages()[name]
    assert message.__dataclass_params__.frozen  # type: ignore[attr-defined]  # dataclasses set it
    assert hasattr(message, "__slots__")
    assert message.__pydantic_config__["extra"] == "forbid"  # type: ignore[attr-defined]  # as above


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_a_setting_says_what_it_means(name: str) -> None:
    description = Settings.model_fields[name].description
    assert description, "docs/settings.md is made from it"
    assert description.endswith("."), "a sentence"
