"""A chat template that writes a date: every prompt of a run has the day on which it started."""

import json
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as templates

from agentrl.config.load import config_from
from agentrl.data.trajectory import Message
from agentrl.render import make_renderer
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.run.evaluate import RolloutRequest
from agentrl.run.folder import RunFolder
from agentrl.utils.errors import ConfigError, RenderError
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer

CLOCK = "{{ '<|im_start|>system\\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + CHATML_TEMPLATE
LLAMA = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}" + CLOCK.replace(
    "strftime_now('%d %b %Y')", "date_string"
)
ASKED = [Message("user", "Which day is it?")]
SAID = Message("assistant", "Today.")


class At(datetime):
    """The clock that transformers gives to templates."""

    day = 26

    @classmethod
    def now(cls, tz: Any = None) -> "At":
        return cls(2026, 11, cls.day, 23, 59, 59)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[At]:
    monkeypatch.setattr(templates, "datetime", At)
    monkeypatch.setattr(At, "day", 26)
    templates._compile_jinja_template.cache_clear()
    return At


def of(template: str, day: str | None) -> Any:
    tokenizer = build_tokenizer(CONTROL_TOKENS, template)
    return tokenizer, make_renderer(tokenizer, day=day)


@pytest.mark.parametrize(("template", "day", "says"), [
    (CLOCK, "2025-03-01", "Today is 01 Mar 2025"), (LLAMA, "2025-03-01", "Today is 01 Mar 2025"),
    (LLAMA, None, "26 Jul 2024"),  # its own: vLLM and other servers give it no `date_string` either
])  # fmt: skip
def test_a_prompt_has_the_day_that_the_renderer_was_given(clock: type[At], template: str, day: str | None, says: str) -> None:
    tokenizer, renderer = of(template, day)
    assert says in tokenizer.decode(renderer.start(ASKED, []))


def test_a_midnight_changes_no_prompt_and_no_answer_of_keeps(clock: type[At]) -> None:
    """The second one was True after midnight, since no turn was found after an opening with another date."""
    for day in (None, "2026-11-26"):
        clock.day = 26
        _, renderer = of(CLOCK, day)
        _, fresh = of(CLOCK, day)
        before = renderer.start(ASKED, [])
        kept = fresh.keeps(SAID, ASKED, ASKED, 1)
        clock.day = 27
        assert renderer.start(ASKED, []) == before and renderer.keeps(SAID, ASKED, ASKED, 1) == kept
        assert renderer.assistant(SAID), "a turn is found after its opening"


def test_a_refusal_inside_keeps_is_an_error_and_no_answer() -> None:
    strict = "{% for m in messages %}{% if m.content == 'More' %}{{ raise_exception('no more') }}{% endif %}{% endfor %}"
    tokenizer, renderer = of(CLOCK, None)
    tokenizer.chat_template = strict + CLOCK
    with pytest.raises(RenderError, match="no more"):
        renderer.keeps(SAID, [Message("user", "More")], ASKED, 1)


def config(out: Path, *words: str) -> Any:
    return config_from({"name": "r", "env": {"id": "key_value"}, "model": {"init": {}}, "out": str(out)}, words)


def test_a_run_keeps_its_first_day(tmp_path: Path) -> None:
    today = date.today().isoformat()
    folder = RunFolder.create(config(tmp_path))
    assert config(tmp_path).with_date(folder.day()).model.date == today, "as stored"
    text = folder.config.read_text()
    folder.config.write_text(text.replace(f'"{today}"', '"2026-01-02"'))
    assert config(tmp_path).with_date(folder.day()).model.date == "2026-01-02", "a resume on another day"
    assert config(tmp_path, "model.date=2026-05-05").with_date(folder.day()).model.date == "2026-05-05"


def test_an_evaluation_goes_on_with_its_first_day(tmp_path: Path) -> None:
    first, again = config(tmp_path), RolloutRequest("eval", "m", 1, 1, "heldout", tmp_path)
    assert first.with_date(again.day()).model.date == date.today().isoformat()
    (tmp_path / "eval.json").write_text(json.dumps({"identity": {"model.date": "2026-01-02"}}))
    assert first.with_date(again.day()).model.date == "2026-01-02"
    (tmp_path / "eval.json").write_text(json.dumps({"identity": {"seed": 0}}))
    assert first.with_date(again.day()).model.date is None, "of an older agentrl, which would be refused as another one"


def test_a_day_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.date.*'tomorrow' is not a day; write YYYY-MM-DD"):
        config(tmp_path, "model.date=tomorrow")
