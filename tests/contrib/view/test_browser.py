"""The viewer's page in a real browser: what it shows of small runs, against computations of the test's own."""

import dataclasses
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image as Pictures
from tokenizers import Tokenizer

import agentrl
from agentrl.data.images import Image
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Message, StopReason, ToolCall, ToolResult, Trajectory, UserCall
from agentrl.run.folder import RunFolder
from agentrl.run.reader import token_lines
from tests.conftest import proof
from tests.contrib.view.chromium import Tab, browser_path, contrast, rgb, serving
from tests.run.made_folders import episode, run_folder, unscored

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\x1b[31mred\x1b[0m \u202egnp.exe\u202c alert'
LONG = "0123456789" * 100_000
TOKENIZER_FILE = Path(agentrl.__file__).parent / "trainer" / "assets" / "tokenizer.json"


def metrics(steps: int = 6, low: float = 0.1) -> list[dict[str, Any]]:
    """A warm start, evaluations before and after, and `steps` updates of which each number can be told by hand."""
    times = {"time/update_s": 2.0, "time/episode_s": 9.0}
    train = [
        {"step": n, "phase": "train", "success": low + n / 10, "tokens": 100 * n, "loss": 1 / n, "env/numbers/success": n / 10}
        | times
        for n in range(1, steps + 1)
    ]
    return [
        {"step": 10, "phase": "sft", "loss": 3.5},
        {"step": 0, "phase": "before", "success": 0.25, "time/eval_s": 1.0},
        *train,
        {"step": steps, "phase": "after", "success": 0.75, "time/eval_s": 1.0},
    ]


def trained() -> list[Trajectory]:
    """40 groups of 3: of each third group all members have the same reward; one is unscored, one was cut off, one is hostile."""
    found = [episode(seed, member, reward(seed, member)) for seed in range(40) for member in range(3)]
    found[4] = unscored(1, 1)
    found[7] = episode(2, 1, 0.5, stop=StopReason.MAX_TURNS, tool_error="bad_key", truncated=True, terminated=False)
    found[7].turns[0].value, found[7].turns[1].value = 0.75, 0.25
    found[10] = episode(3, 1, 0.0, answer=HOSTILE, said=HOSTILE, key=HOSTILE)
    found[11] = episode(3, 2, 0.0, answer=LONG, said="zebra")
    long = TokenLedger()
    long.append_sampled([5] * 30_000, [-0.5] * 30_000, [3] * 30_000, 0)
    found[9].ledgers.append(long)
    return found


MARK = "<b onclick=alert(1)>bold</b><img src=x onerror='window.hacked=1'>\u202e"


def acted(said: str) -> list[UserCall]:
    """Calls of the user's before its first words and after the last turn."""
    answers = [ToolResult("user_0", said, said), ToolResult("user_1", said, said, error=said)]
    return [
        UserCall(turn, 0, ToolCall(said, {said: said}, answer.call_id), answer, said)
        for turn, answer in zip((-1, 1), answers, strict=True)
    ]


def hostile_run(at: Path) -> None:
    """A run in which every name that somebody else chooses is markup."""
    bad = episode(0, 0, 0.0, env=MARK, error=MARK, stop=StopReason.ENV_ERROR, said=MARK, split=MARK)
    bad.task = dataclasses.replace(bad.task, id=MARK, data={MARK: MARK}, gold={MARK: [MARK]})
    calls = (ToolCall(MARK, {MARK: MARK}, "c"),)
    bad.turns[0].message = bad.messages[1] = dataclasses.replace(bad.turns[0].message, reasoning=MARK, tool_calls=calls)
    bad.turns[0].results[0] = ToolResult("c", MARK, MARK, error=MARK)
    bad.tools, bad.state = [{"function": {"name": MARK, "description": MARK}}], {MARK: MARK}
    root = {"node": MARK, "at": MARK, "id": MARK, "value": 0.0, "unscored": MARK, "evidence": {MARK: MARK}}
    bad.evidence = {"spec": MARK, "root": root}
    bad.rewrites, bad.cause, bad.metrics = [{"turn": 1, "ledger": 0, "tokens": 3, "added": MARK}], {MARK: MARK}, {MARK: 0.5}
    bad.user_calls = acted(MARK)
    folder = run_folder(at, {"step_000001": [bad, episode(1)]}, [{"step": 1, "phase": "train", f"env/{MARK}/{MARK}": 1.0}])
    folder.config.write_text(f'name = {json.dumps(MARK)}\nsteps = 1\n[env]\nid = "key_value"\nname = {json.dumps(MARK)}\n')
    folder.write_summary({"name": MARK, "status": MARK, "error": MARK, "envs": {MARK: {"success_after": 0.5}}})


class Trained:
    """Numbers of training for these episodes' tokens: of each ledger the same, over and over."""

    def __init__(self, members: list[Trajectory]) -> None:
        self.sizes = [ledger.sampled_tokens for one in members if one.reward is not None for ledger in one.ledgers]

    def row(self, number: int) -> tuple[Any, Any]:
        size = self.sizes[number]
        return np.resize([1.5, -0.5, 0.75, 0.75], size), np.resize([0.125, -0.25, 0.0, 2.0], size)


def reward(seed: int, member: int) -> float:
    return 1.0 if seed % 3 == 0 and seed != 3 else (0.0, 1.0, 0.5)[(seed + member) % 3]


def held(*rewards: float) -> list[Trajectory]:
    return [episode(seed, 0, value, split="heldout", said=f"{seed}" if value else "no") for seed, value in enumerate(rewards)]


def files_of_first() -> dict[str, list[Trajectory]]:
    return {"before_000000": held(0.0, 1.0, 0.0, 1.0), "step_000006": trained(), "after_000006": held(1.0, 0.0, 0.0, 1.0)}


PICTURE = Image.of(Pictures.new("RGB", (7, 3), (220, 30, 30)))


def pictured(one: Trajectory) -> Trajectory:
    """With an image in its opening and in its tool's answer."""
    one.messages[0] = Message("user", f"look: {PICTURE.line}", images=(PICTURE,))
    answer = one.turns[0].results[0]
    one.turns[0].results[0] = dataclasses.replace(answer, content=PICTURE.line, images=(PICTURE,))
    return one


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("runs")
    folder = run_folder(at / "first", files_of_first(), metrics())
    folder.model.mkdir()
    shutil.copy(TOKENIZER_FILE, folder.model / "tokenizer.json")
    folder.write_tokens("step_000006", token_lines(trained(), Trained(trained())))  # type: ignore[arg-type]
    second = held(1.0, 1.0, 0.0, 1.0)
    second[3].user_calls, second[3].parting = acted("press"), "Bye then."
    second[2].user_calls = acted("press")
    second[2].messages = [one for one in second[2].messages if one.role != "user"]
    second[1] = pictured(second[1])
    run_folder(at / "second", {"after_000006": second}, metrics(low=0.2))
    run_folder(at / "going", {}, metrics()[:4])
    hostile_run(at / "hostile")
    return at


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = browser_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def base(folders: Path, browser: Any) -> Iterator[str]:
    with serving(folders) as address:
        yield address


@pytest.fixture(scope="module")
def opened(browser: Any, base: str) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce")
    yield Tab(context, base)
    context.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """The page, which after each test must not have complained, and must have asked this server alone."""
    opened.complaints.clear()
    yield opened
    assert opened.complaints == []
    assert {url for url in opened.requests if not url.startswith(opened.base)} == set()


def test_runs_and_the_curves_of_those_that_are_chosen(tab: Tab) -> None:
    tab.go("?runs=first~second&m=success~loss", "[data-metric=loss] canvas")
    names = tab.column("table.runs", "run")
    columns = [tab.column("table.runs", name) for name in ("status", "before", "after", "tokens", "updates")]
    rows = {name: [column[place] for column in columns] for place, name in enumerate(names)}
    assert rows["first"] == ["done", "0.25", "0.75", "2,100", "6 / 4"]
    assert rows["going"] == ["live", "0.25", "–", "300", "2 / 4"]
    # The legend says the last value of each run: of training, then of the held-out tasks.
    assert tab.texts("[data-metric=success] .legend li") == ["first 0.7", "held out 0.75", "second 0.8", "held out 0.75"]
    assert tab.texts("[data-metric=loss] .legend li") == ["first 0.1667", "second 0.1667"]
    colors = tab.page.eval_on_selector_all("[data-metric] .key", "all => all.map(one => getComputedStyle(one).borderTopColor)")
    assert colors[:2] == [colors[0]] * 2 and colors[2:4] == [colors[2]] * 2 and colors[4:] == [colors[0], colors[2]]
    assert colors[0] != colors[2]
    tab.page.locator("[data-run=second] input").click()
    tab.wait("() => document.querySelectorAll('[data-metric=success] .legend li').length === 2")
    assert tab.texts("[data-metric=success] .legend li") == ["training 0.7", "held out 0.75"]
    assert "runs=first&" in tab.page.url + "&"


def test_the_pointer_says_the_values_under_it(tab: Tab) -> None:
    tab.go("run/first?m=success~loss", "[data-metric=loss] canvas")
    area = tab.page.locator("[data-metric=success] .u-over").bounding_box()
    # x runs from step 0 (before) to step 6; the pointer is at step 3.
    tab.page.mouse.move(area["x"] + area["width"] * 3 / 6, area["y"] + 40)
    tab.wait("() => document.querySelector('[data-metric=success] .at').textContent === 'step 3'")
    assert tab.texts("[data-metric=success] .legend .now")[0] == "0.4"
    tab.page.mouse.move(0, 0)
    tab.wait("() => document.querySelector('[data-metric=success] .at').textContent === 'last'")


def test_what_a_curve_is_made_of(tab: Tab) -> None:
    """Steps, tokens so far, seconds so far; the average that smoothing shows; and no logarithm of what is not positive."""
    ask = "async ([rows, name, axis]) => (await import('/js/metrics.js')).curve(rows, name, axis)"
    rows = metrics(3)
    found = {axis: tab.page.evaluate(ask, [rows, "success", axis]) for axis in ("step", "tokens", "seconds")}
    assert found["step"]["train"]["xs"] == [1, 2, 3] and found["step"]["held"] == {"xs": [0, 3], "ys": [0.25, 0.75]}
    assert found["tokens"]["train"]["xs"] == [100, 300, 600] and found["tokens"]["held"]["xs"] == [0, 600]
    assert found["seconds"]["train"]["xs"] == [3, 5, 7] and found["seconds"]["held"]["xs"] == [1, 8]
    assert tab.page.evaluate(ask, [rows, "sft:loss", "step"])["train"] == {"xs": [10], "ys": [3.5]}
    data = [{"phase": "data", "step": 1, "loss": 2.0, "tokens_trained": 40, "time/data_s": 3.0}]
    data = [{"phase": "heldout", "step": 0, "loss": 4.0}, *data, {"phase": "heldout", "step": 1, "loss": 1.0}]
    for axis, ends in {"step": [0, 1], "tokens": [0, 40], "seconds": [0, 3]}.items():
        curve = {"train": {"xs": ends[1:], "ys": [2]}, "held": {"xs": ends, "ys": [4, 1]}}
        assert tab.page.evaluate(ask, [data, "loss", axis]) == curve, "of a run on data"
    values, weight = [1.0, 0.0, 4.0], 0.5
    powers = [weight ** np.arange(n, -1, -1.0) for n in range(3)]
    expected = [np.average(values[: n + 1], weights=powers[n]) for n in range(3)]
    smooth = tab.page.evaluate("async ([ys, w]) => (await import('/js/metrics.js')).smoothed(ys, w)", [values, weight])
    assert smooth == pytest.approx(expected)
    lines = [{"xs": [1, 3], "ys": [0, 2]}, {"xs": [2, 3], "ys": [5, -1]}]
    align = "async ([lines, log]) => (await import('/js/chart.js')).aligned(lines, log)"
    assert tab.page.evaluate(align, [lines, False]) == [[1, 2, 3], [0, None, 2], [None, 5, -1]]
    assert tab.page.evaluate(align, [lines, True]) == [[1, 2, 3], [None, None, 2], [None, 5, None]]


def test_an_episode_with_a_success_alone_is_scored(tab: Tab) -> None:
    """As in evaluations under a spec that compares the members of a group."""
    ask = "(one) => import('/js/parts.js').then((at) => [at.outcomeClass(one), at.Outcome({episode: one}).props.children])"
    found = [tab.page.evaluate(ask, {"reward": None, "success": success}) for success in (True, False, None)]
    assert found == [["solved", "solved"], ["failed", "not solved"], ["unscored", "unscored"]]


def test_the_table_of_steps(tab: Tab) -> None:
    tab.go("run/first/steps?c=success~loss", "table.steps tbody tr")
    assert tab.column("table.steps", "step") == list("66543210")  # newest first; the warm start has neither
    tab.page.get_by_role("button", name="loss").click()
    tab.wait("() => document.querySelector('table.steps [aria-sort=descending]')")
    assert tab.column("table.steps", "loss") == ["1", "0.5", "0.3333", "0.25", "0.2", "0.1667", "–", "–"]
    tab.page.get_by_role("button", name="Columns").click()
    tab.page.get_by_label("tokens", exact=True).check()
    tab.wait("() => document.querySelectorAll('table.steps thead th').length === 5")
    assert tab.column("table.steps", "tokens")[0] == "100"


def expected_rows() -> list[dict[str, Any]]:
    """All episodes of the run `first`, as the test knows them."""
    return [{"id": f"{name}.{row}", "of": one} for name, ones in files_of_first().items() for row, one in enumerate(ones)]


def ids(tab: Tab) -> list[str]:
    return tab.page.eval_on_selector_all("[data-episode]", "all => all.map(one => one.dataset.episode)")


def shows(tab: Tab, count: int) -> None:
    tab.wait("n => document.querySelector('[data-total]')?.dataset.total === String(n)", count)


def test_facets_and_filters_of_episodes(tab: Tab) -> None:
    everything = expected_rows()
    tab.go("run/first/episodes", "[data-episode]")
    assert int(tab.page.get_attribute("[data-total]", "data-total")) == len(everything) == 128 and len(ids(tab)) == 100
    stops = Counter(row["of"].stop.value for row in everything)
    assert tab.texts("[data-facet=stop] li .value") == ["done", "env_error", "max_turns"]
    assert tab.texts("[data-facet=stop] li .count") == [str(stops[name]) for name in ("done", "env_error", "max_turns")]
    rates = [row["of"].success for row in everything if row["of"].stop == StopReason.DONE]
    assert tab.texts("[data-facet=stop] li .rate")[0] == f"{sum(rates) / len(rates):.2f}"
    tab.page.locator("[data-facet=stop] button", has_text="max_turns").click()
    shows(tab, 1)
    assert ids(tab) == ["step_000006.7"] and tab.texts(".chip") == ["stop reason: max_turns ×"]
    tab.page.locator(".chip").click()
    shows(tab, 128)
    tab.page.get_by_role("button", name="failed").click()
    lost = [row["id"] for row in everything if row["of"].success is False]
    shows(tab, len(lost))
    tab.page.get_by_label("least reward").fill("0.4")
    tab.page.get_by_label("least reward").press("Enter")
    some = [row["id"] for row in everything if row["of"].success is False and row["of"].reward >= 0.4]
    shows(tab, len(some))
    assert set(ids(tab)) == set(some)
    tab.go("run/first/episodes", "[data-episode]")
    tab.page.locator("[data-facet=term] li button", has_text="answer").click()
    tab.page.locator("[data-facet=term] button", has_text="< 0.5").click()
    low = [row["id"] for row in everything if row["of"].reward is not None and row["of"].reward < 0.5]
    shows(tab, len(low))
    assert set(ids(tab)) == set(low) and tab.texts(".chip") == ["term: answer<0.5 ×"]
    tab.go("run/first/episodes?tool=get&error=bad_key", "[data-episode]")
    shows(tab, 1)
    tab.page.get_by_label("search episodes").fill("nothing of that kind")
    tab.page.wait_for_selector("text=No episode fits these filters")
    tab.page.get_by_role("button", name="Remove all filters").click()
    shows(tab, 128)


def test_pages_and_sorting_of_episodes(tab: Tab) -> None:
    everything = expected_rows()
    tab.go("run/first/episodes", "[data-episode]")
    shows(tab, 128)
    first = ids(tab)
    tab.page.get_by_role("button", name="next ›").click()
    tab.wait("() => document.querySelectorAll('[data-episode]').length === 28")
    assert sorted([*first, *ids(tab)]) == sorted(row["id"] for row in everything)
    tab.page.get_by_role("button", name="reward").click()
    tab.wait("() => document.querySelectorAll('[data-episode]').length === 100")  # and the first page again
    best = sum(row["of"].reward == 1 for row in everything)
    assert [value == "1.00" for value in tab.column("table.episodes", "reward")] == [n < best for n in range(100)]
    tab.page.get_by_role("button", name="reward").click()
    tab.wait("() => document.querySelector('table.episodes tbody .reward').textContent !== '1.00'")
    low = [value for value in tab.column("table.episodes", "reward") if value != "–"]
    assert low == sorted(low)


def test_keys_walk_through_episodes(tab: Tab) -> None:
    tab.go("run/first/episodes?task=t/train/5&sort=reward", "[data-episode]")
    shows(tab, 3)
    found = ids(tab)
    assert found == [f"step_000006.{15 + member}" for member in sorted(range(3), key=lambda m: (-reward(5, m), -m))]
    for key in ("j", "ArrowDown", "k"):
        tab.page.keyboard.press(key)
    assert tab.page.get_attribute("tr.chosen", "data-episode") == found[0]
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("text=1 of 3 in the list")
    tab.page.keyboard.press("j")
    tab.page.wait_for_selector("text=2 of 3 in the list")
    assert f"/episode/{found[1]}?" in tab.page.url
    tab.page.wait_for_selector(".member.current")
    tab.page.keyboard.press("u")
    tab.page.wait_for_selector("[data-episode]")
    assert "task=t%2Ftrain%2F5" in tab.page.url
    tab.page.keyboard.press("/")
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "search episodes"
    tab.page.keyboard.type("j?")  # text in a field is no command
    assert tab.count("dialog") == 0
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("?")
    tab.page.wait_for_selector("dialog[open]")
    tab.page.keyboard.press("Escape")
    tab.wait("() => !document.querySelector('dialog')")


def test_groups_and_which_teach_nothing(tab: Tab) -> None:
    tab.go("run/first/groups", "[data-group]")
    groups = [[one.reward for one in trained()[3 * n : 3 * n + 3]] for n in range(40)]
    scored = [[value for value in group if value is not None] for group in groups]
    nothing = sum(max(group) == min(group) for group in scored)
    assert tab.texts("table.groups .badge").count("teaches nothing") == nothing > 0
    assert tab.texts("[data-group='step_000006.g1'] .member") == ["1", "?", "0"]
    mean = sum(scored[2]) / 3
    std = math.sqrt(sum((value - mean) ** 2 for value in scored[2]) / 3)
    assert tab.texts("[data-group='step_000006.g2'] td")[1:3] == [f"{mean:.2f}", f"{std:.2f}"]
    tab.page.get_by_role("button", name="those that teach nothing").click()
    tab.wait("n => document.querySelectorAll('[data-group]').length === n", nothing)


def test_one_episode_turn_by_turn(tab: Tab) -> None:
    tab.go("run/first/episode/step_000006.7", "[data-turn='1']")
    assert tab.texts("[data-turn='0'] .call") == ['get call key "k2"']
    assert tab.texts("[data-turn='0'] .answer") == ["get answered in 250 ms bad_key 2"]
    assert tab.texts("[data-turn='1'] .text") == ["2"]
    assert tab.texts("[data-worth] span") == ["0.75 → 0.25 here", "0.25 → 0.00"]
    widths = tab.page.eval_on_selector_all("[data-worth='0'] i", "all => all.map(one => one.style.width)")
    assert widths == ["25%", "50%"]
    assert tab.texts(".tree [data-node=answer] .value") == ["0.5"]
    assert tab.page.get_attribute(".tree [data-node=answer]", "data-verdict") == "part"
    gold = tab.page.locator("section:has(h2:text-is('Gold')) .json").inner_text()
    assert json.loads(gold) == trained()[7].task.gold and '{"name": "get", "arguments": {"key": "k2"}}' in gold
    tab.wait("() => !document.querySelector('.members').textContent.includes('…')")
    assert tab.texts(".members .member") == [f"{reward(2, 0):g}", "0.5", f"{reward(2, 2):g}"]
    assert tab.texts(".member.current") == ["0.5"]
    # 0.75 s of the first turn (0.25 of them in the tool) and 0.5 of the second, of 2 seconds in all.
    widths = tab.page.eval_on_selector_all(".timing .spans:first-of-type i", "all => all.slice(0, 3).map(one => one.style.width)")
    assert widths == ["50%", "12.5%", "37.5%"]
    tab.page.keyboard.press("]")
    tab.wait("() => location.hash.includes('step_000006.8')")


def test_the_users_calls_stand_where_they_were_made(tab: Tab) -> None:
    tab.go("run/second/episode/after_000006.3", "[data-turn='1']")
    order = tab.page.eval_on_selector_all(
        ".episode article", "all => all.map(one => one.dataset.userCalls ? 'acted' : one.querySelector('.role').textContent)"
    )
    assert order == ["acted", "user", "turn 0", "turn 1", "acted", "user"]
    assert tab.texts("[data-parting] .text") == ["Bye then."]
    assert tab.texts("[data-user-calls] .call") == ['press call press "press"'] * 2
    assert tab.texts("[data-user-calls] .answer") == ["press answered press", "press answered press press"]
    assert tab.page.locator(".failed", has_text="press").count() == 1
    tab.go("run/second/episode/after_000006.2", "[data-turn='1']")
    order = tab.page.eval_on_selector_all(".episode article", "all => all.map(one => one.dataset.userCalls ? 'acted' : 'turn')")
    assert order == ["acted", "turn", "turn", "acted"], "an opening without a word of the user's"


def test_images_are_shown_where_they_were_answered(tab: Tab) -> None:
    place = "[data-turn='0'] .answer img"
    tab.go("run/second/episode/after_000006.1", place)
    tab.wait("s => document.querySelector(s).complete", place)  # under the page's own policy of what may be loaded
    sizes = tab.page.eval_on_selector_all("img", "all => all.map(one => [one.naturalWidth, one.naturalHeight, one.alt])")
    assert sizes == [[7, 3, PICTURE.line]] * 2 and tab.count("article.message img") == 1
    assert tab.texts("[data-turn='0'] .answer .text") == [PICTURE.line]
    drawn = """s => { const c = document.createElement('canvas').getContext('2d'); c.drawImage(document.querySelector(s), 0, 0);
        return [...c.getImageData(6, 2, 1, 1).data]; }"""
    assert tab.page.evaluate(drawn, place) == [220, 30, 30, 255]


def test_hostile_text_is_text(tab: Tab) -> None:
    tab.go("run/first/episode/step_000006.10", "[data-turn='1']")
    shown = HOSTILE.replace("\x1b", "␛").replace("\u202e", "U+202E").replace("\u202c", "U+202C")
    assert tab.texts("[data-turn='1'] .text") == [shown]
    assert tab.texts("[data-turn='0'] .answer .text") == [shown]
    assert "<img src=x onerror=" in tab.texts("[data-turn='0'] .call")[0]
    for view in ("tokens", "json"):
        tab.go(f"run/first/episode/step_000006.10?view={view}", ".ledger" if view == "tokens" else ".body > .text")
    tab.go("run/first/episodes?q=onerror", "[data-episode]")
    tab.go("compare?a=first:step_000006&b=first:step_000006&task=t/train/3&env=numbers&ia=step_000006.10", ".aligned")
    assert tab.count("img") == 0 and tab.count("script") == 3  # those of index.html
    assert tab.page.evaluate("window.hacked") is None


def test_hostile_names_are_text_on_every_page(tab: Tab) -> None:
    shown = MARK.replace("\u202e", "U+202E")
    pages = ["?runs=hostile&steps=1", "run/hostile/config", "compare?a=hostile:step_000001&b=hostile:step_000001"]
    parts = "episodes groups failures suspects steps episode/step_000001.0 episode/step_000001.0?view=json"
    for address in [*pages, "run/hostile", *(f"run/hostile/{part}" for part in parts.split())]:
        tab.go(address, "main")
        tab.wait("text => document.body.textContent.includes(text)", shown)
        assert tab.count("main b, main img, .bar b, .bar img") == 0, address
    tab.go(f"compare?a=hostile:step_000001&b=hostile:step_000001&task={quote(MARK)}&env={quote(MARK)}", ".aligned")
    assert tab.count("main b, main img") == 0 and tab.page.evaluate("window.hacked") is None


def test_a_long_answer_is_folded(tab: Tab) -> None:
    tab.go("run/first/episode/step_000006.11", "[data-turn='1']")
    answer = "[data-turn='0'] .answer"
    assert len(tab.texts(f"{answer} .text")[0]) == 2400
    more = tab.page.locator(f"{answer} .fold button").first
    assert more.text_content().split() == f"show 20,000 more of {len(LONG) - 2400:,} characters".split()
    more.click()
    tab.wait("s => document.querySelector(s).textContent.length === 22400", f"{answer} .text")


# The palette of js/colors.js: the page's ground, the ink of unlikely tokens, and those of numbers above and below the middle.
INKS = {
    "light": {"ground": (255, 255, 255), "warm": (240, 140, 46), "up": (74, 144, 226), "down": (235, 110, 95)},
    "dark": {"ground": (26, 29, 33), "warm": (158, 84, 12), "up": (34, 92, 168), "down": (158, 48, 40)},
}


def mixed(theme: str, ink: str, share: float) -> list[float]:
    ground, full = INKS[theme]["ground"], INKS[theme][ink]
    return [math.floor(a + (b - a) * min(max(share, 0.0), 1.0) + 0.5) for a, b in zip(ground, full, strict=True)]


def grounds(tab: Tab) -> list[list[float] | None]:
    """The background of each token as [r, g, b]; None for a transparent one."""
    ask = "all => all.map(one => getComputedStyle(one).backgroundColor)"
    found = [rgb(color) for color in tab.page.eval_on_selector_all(".ledger [data-t]", ask)]
    return [None if len(color) == 4 and color[3] == 0 else color[:3] for color in found]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_tokens_are_colored_by_what_is_known_of_them(tab: Tab, theme: str) -> None:
    """The ledger: 3 tokens of context, 2 sampled (logprobs -0.5, -0.25; version 3), 1 of context, 2 sampled (-0.125; 4)."""
    tab.page.emulate_media(color_scheme=theme)
    tab.go("run/first/episode/step_000006.0?view=tokens", ".ledger [data-t]")
    words = Tokenizer.from_file(str(TOKENIZER_FILE))
    ids = (1, 2, 3, 4, 5, 6, 7, 7)
    assert tab.texts(".ledger [data-t]") == [words.decode([token], skip_special_tokens=False) for token in ids]
    logprobs = [None, None, None, -0.5, -0.25, None, -0.125, -0.125]
    assert grounds(tab) == [None if value is None else mixed(theme, "warm", value / -4) for value in logprobs]
    # Advantages 1.5 and -0.5 of the first turn's tokens, 0.75 of the others; the largest one has the full color.
    for mode, full, values in (("advantage", 1.5, (1.5, -0.5, 0.75, 0.75)), ("ratio", math.log(1.5), (0.125, -0.25, 0.0, 2.0))):
        tab.page.locator("button", has_text=mode).click()
        tab.page.wait_for_selector(f".scale[aria-label='{mode}: legend']")
        first, second, *rest = [mixed(theme, "down" if value < 0 else "up", abs(value) / full) for value in values]
        assert grounds(tab) == [None, None, None, first, second, None, *rest], mode
    tab.page.locator("[data-t='4']").hover()
    tab.page.wait_for_selector(".tip")
    tip = dict(zip(tab.texts(".tip dt"), tab.texts(".tip dd"), strict=True))
    assert (tip["id"], tip["token"], tip["turn"], tip["version"]) == ("5", "4", "0", "3")
    assert tip["logprob"].startswith("-0.25 (p 0.779") and tip["advantage"] == "-0.5" and tip["ratio"] == "0.7788"
    tab.page.mouse.move(0, 0)
    tab.page.emulate_media(color_scheme="light")


def test_every_token_is_readable_on_its_color(tab: Tab) -> None:
    ends = [{"sampled": True, "logprob": -9, "advantage": side, "ratio": 1 + side / 2} for side in (-1, 1)]
    tokens = [{**end, "version": n, "turn": n} for end in ends for n in range(8)]
    ask = """async ([all, theme]) => {
      const { MODES, tint } = await import('/js/colors.js');
      return MODES.flatMap((mode) => all.map((token) => tint(mode, token, {}, theme)));
    }"""
    for theme, text in (("light", (29, 32, 36)), ("dark", (229, 231, 234))):
        worst = min(contrast(text, color) for color in tab.page.evaluate(ask, [tokens, theme]))
        assert worst >= 4.5


def test_a_long_ledger_is_read_where_it_is_looked_at(tab: Tab) -> None:
    """Episode 9 has a second ledger of 30,000 tokens: blocks of 1,000, of which those near the screen are asked for and drawn."""
    tab.requests.clear()
    tab.go("run/first/episode/step_000006.9?view=tokens&ledger=1", ".ledger [data-t]")
    assert tab.texts("select[aria-label=ledger] option") == ["0: 8 tokens, 4 sampled", "1: 30,000 tokens, 30,000 sampled"]
    last = "[data-block='29'] [data-t='999']"
    tab.wait("s => { scrollTo(0, document.body.scrollHeight); return document.querySelector(s); }", last)
    asked = {int(url.split("offset=")[1].split("&")[0]) // 1000 for url in tab.requests if "/tokens?" in url}
    assert {0, 29} <= asked and len(asked) < 20
    assert 0 < tab.count("[data-t]") <= 12_000


def test_two_steps_side_by_side(tab: Tab) -> None:
    tab.go("compare?a=first:before_000000&b=second:after_000006", "table.pairs tbody tr")
    # before 0 1 0 1, after 1 1 0 1: one task is won, none lost.
    assert tab.texts("table.pairs tbody .badge") == ["won", "both solved", "neither solved", "both solved"]
    assert tab.texts("table.pairs tbody button") == [f"t/heldout/{n}" for n in (0, 1, 2, 3)]
    tab.page.keyboard.press("j")
    tab.page.wait_for_selector(".aligned [data-row='2']")
    rows = tab.page.eval_on_selector_all(
        ".aligned [data-row]", "all => all.map(one => [one.dataset.row, one.classList.contains('differs')])"
    )
    # What was asked; the call, which is the same; the answer, which is not.
    assert rows == [["0", False], ["1", False], ["2", True]]
    tab.go("compare?a=first:after_000006&b=second:after_000006&show=won", "table.pairs tbody tr")
    assert tab.texts("table.pairs tbody button") == ["t/heldout/1"]


def test_means_of_two_sides_are_over_the_tasks_that_both_know(tab: Tab) -> None:
    members = [[{"id": f"before_000000.{n}", "reward": None, "success": known}] for n, known in enumerate((True, False, None))]
    pair = {"env": "e", "split": "", "content": "", "task": "t"}
    pairs = [{**pair, "a": members[1], "b": members[1], "verdict": "neither solved"}]
    pairs += [{**pair, "task": "u", "a": members[0], "b": members[2], "verdict": "unknown"}]
    answer = {"pairs": pairs, "only_a": [], "only_b": []}
    tab.page.route("**/api/compare?*", lambda route: route.fulfill(json=answer))
    tab.go("compare?a=first:before_000000&b=second:after_000006", "table.pairs tbody tr")
    said = " ".join(tab.texts("main .muted"))
    tab.page.unroute("**/api/compare?*")
    assert "mean success A 0.000, B 0.000" in said


def test_two_runs_are_compared_at_the_same_phase_by_themselves(tab: Tab) -> None:
    tab.go("compare?a=first&b=second", "table.pairs tbody tr")
    assert tab.page.url.count("after_000006") == 2
    tab.go("compare?a=second&b=first:before_000000", "table.pairs tbody tr")
    assert "second%3Aafter_000006" in tab.page.url, "it has no episodes of that phase: those of held-out tasks, not of training"
    tab.go("compare?a=first&b=first", "table.pairs tbody tr")
    assert "first%3Abefore_000000" in tab.page.url and "first%3Aafter_000006" in tab.page.url


def test_held_out_tasks_have_intervals_on_the_page(tab: Tab) -> None:
    tab.go("run/first", "table.evaluations tbody tr")
    # before 0 1 0 1 of four tasks: 1.96 sqrt(1/3 / 4) = 0.566 on either side of 0.5, cut to [0, 1].
    assert tab.texts("table.evaluations tbody tr:first-child td")[0] == "before"
    assert tab.texts("table.evaluations tbody tr:first-child td")[-1] == "0.500 0.000 to 1.000"


def test_a_page_that_opens_before_its_episodes_are_read_catches_up(tab: Tab) -> None:
    """The run has ended, and the first answer knows no episode of it yet: the page asks again."""
    whole = tab.page.request.get(f"{tab.base}api/runs/first").json()
    assert (whole["indexed"], whole["of"]) == (128, 128)
    early = whole | {"evaluations": [], "indexed": 0, "of": 43}
    tab.page.route("**/api/runs/first", lambda route: route.fulfill(json=early), times=1)
    tab.go("run/first", "table.evaluations tbody tr")
    assert tab.count("text=Reading episodes") == 0


def test_failures_lead_to_examples(tab: Tab) -> None:
    tab.go("run/first/failures", "table.failures tbody tr")
    found = dict(zip(tab.column("table.failures", "reason"), tab.column("table.failures", "episodes"), strict=True))
    lost = [row["of"] for row in expected_rows() if row["of"].success is False and row["of"].reward < 0.5]
    assert found["answer (text.equals) below 0.5"] == str(len(lost))
    tab.page.get_by_role("button", name="tool", exact=True).click()
    tab.wait("() => document.querySelectorAll('table.failures tbody tr').length === 1")
    tab.page.locator("table.failures tbody a").first.click()
    tab.page.wait_for_selector("[data-turn='0'] .answer.failed")
    assert "/episode/step_000006.7" in tab.page.url


def test_what_to_do_if_something_is_not_there(tab: Tab) -> None:
    tab.go("run/none", "[role=alert]")
    assert "there is no run 'none'" in tab.texts("[role=alert]")[0]
    tab.page.route("**/api/runs/second*", lambda route: route.abort())
    tab.go("run/second", "[role=alert]")
    assert "The server does not answer. Is `agentrl view` still running?" in tab.texts("[role=alert]")[0]
    tab.page.unroute("**/api/runs/second*")
    tab.page.get_by_role("button", name="Try again").click()
    tab.page.wait_for_selector("[data-metric=success] canvas")
    # The browser itself says of each of these that it failed.
    assert all("Failed to load resource" in text for text in tab.complaints) and len(tab.complaints) >= 2
    tab.complaints.clear()


def test_a_live_run_grows_under_the_reader(browser: Any, base: str, folders: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 500})
    live = Tab(context, base)
    live.page.clock.install()
    live.go("run/going/steps?c=success~loss", "table.steps tbody tr")
    assert live.column("table.steps", "step") == ["2", "1", "0"]
    assert live.texts(".bar .live") == ["live"]
    live.page.evaluate("() => { scrollTo(0, 40); document.querySelector('table.steps').dataset.mine = 'kept'; }")
    before = live.page.evaluate("scrollY")
    RunFolder(folders / "going").append_metrics(metrics()[4])
    live.page.clock.run_for(2500)
    live.wait("() => document.querySelectorAll('table.steps tbody tr').length === 4")
    assert live.column("table.steps", "step") == ["3", "2", "1", "0"]
    assert live.page.evaluate("document.querySelector('table.steps').dataset.mine") == "kept"
    assert live.page.evaluate("scrollY") == before and live.complaints == []
    asked = [url for url in live.requests if "going/metrics" in url]
    assert "after=4" in asked[-1]  # only what is new is asked for
    live.go("run/going?m=loss", "[data-metric=loss] canvas")
    area = live.page.locator("[data-metric=loss] .u-over").bounding_box()
    live.page.mouse.move(area["x"] + 2, area["y"] + 40)  # at the first step, also when the axis gets longer
    live.wait("() => document.querySelector('[data-metric=loss] .at').textContent === 'step 1'")
    RunFolder(folders / "going").append_metrics(metrics()[5])
    live.page.clock.run_for(2500)
    live.wait("() => document.querySelector('[data-metric=loss]').dataset.points === '4'")
    x = live.page.eval_on_selector("[data-metric=loss] .at", "one => one.textContent")
    assert x == "step 1" and live.texts("[data-metric=loss] .now") == ["1"]  # still those under the pointer
    context.close()


PAGES = {
    "?runs=first~second&steps=1": "[data-metric=success] canvas", "run/first": "[data-metric=success] canvas",
    "run/first/episodes?stop=done": "[data-episode]", "run/first/groups": "[data-group]",
    "run/first/failures": "table.failures tbody tr", "run/first/suspects": ".panel", "run/first/steps": "table.steps tbody tr",
    "run/first/config": ".text", "run/first/episode/step_000006.7": "[data-turn='1']",
    "run/first/episode/step_000006.10": "[data-turn='1']", "run/first/episode/step_000006.4?view=tokens": ".ledger [data-t]",
    "compare?a=first:before_000000&b=second:after_000006&task=t/heldout/0&env=numbers": ".aligned", "run/none": "[role=alert]",
}  # fmt: skip

# Each piece of text that is seen, as [text, its color, what it stands on]: the grounds of all elements below it, blended.
SEEN = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const over = (top, below) => { const a = top[3] ?? 1; return [0, 1, 2].map((n) => top[n] * a + below[n] * (1 - a)); };
  const srgb = (color) => {
    const canvas = Object.assign(document.createElement('canvas'), { width: 1, height: 1 }).getContext('2d');
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) known.set(color, color.startsWith('rgb') ? channels(color) : srgb(color));
    return known.get(color);
  };
  const ground = (one) => (one ? over(rgba(getComputedStyle(one).backgroundColor), ground(one.parentElement)) : [255, 255, 255]);
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !one.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (one.closest('canvas, option, noscript, [disabled]')) continue;
    const below = ground(one);
    found.push([walk.currentNode.data.trim().slice(0, 40), over(rgba(getComputedStyle(one).color), below), below]);
  }
  return found;
}"""


@proof
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("address", PAGES)
def test_all_text_is_readable_and_no_page_is_wider_than_the_window(tab: Tab, address: str, theme: str) -> None:
    tab.page.emulate_media(color_scheme=theme)
    for width in (1280, 900):
        tab.page.set_viewport_size({"width": width, "height": 900})
        tab.go(address, PAGES[address])
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    seen = tab.page.evaluate(SEEN)
    assert len(seen) > 10
    assert [(text, round(ratio, 2)) for text, ink, below in seen if (ratio := contrast(ink, below)) < 4.5] == []
    tab.page.set_viewport_size({"width": 1280, "height": 900})
    tab.page.emulate_media(color_scheme="light")
    if address == "run/none":
        tab.complaints.clear()  # the browser itself says that there is no such run


LARGE = {
    "run/large": "[data-metric=success] canvas",
    "run/large?m=" + "~".join(f"term/t{n}" for n in range(12)): "[data-metric='term/t11'] canvas",
    "run/large/steps": "table.steps tbody tr", "run/large/episodes": "[data-episode]",
    "run/large/episodes?success=false&sort=reward": "[data-episode]", "run/large/episodes?offset=99900": "[data-episode]",
    "run/large/episodes?q=k77": "[data-episode]", "run/large/groups": "[data-group]",
    "run/large/failures": "table.failures tbody tr", "run/large/suspects": ".panel",
    "run/large/episode/step_000050.7": "[data-turn='1']",
    "compare?a=large:step_000001&b=large:step_000100": "table.pairs tbody tr",
}  # fmt: skip


@proof
@pytest.mark.timeout(900)
def test_a_run_of_100_000_episodes_and_5_000_updates_is_usable(browser: Any, tmp_path: Path) -> None:
    """Each page is there within 5 seconds (on a quiet machine each takes less than one: `-s` prints them)."""
    rows = [
        {"step": n, "phase": "train", "success": n / 5000, "tokens": 9, **{f"term/t{k}": n * k for k in range(60)}}
        for n in range(1, 5001)
    ]
    folder = run_folder(tmp_path / "large", {}, [])
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    members = [(seed, member) for seed in range(125) for member in range(8)]
    lines = [json.dumps(episode(seed, member, float((seed + member) % 2)).to_json()) + "\n" for seed, member in members]
    for step in range(1, 101):
        (folder.trajectories / f"step_{step:06d}.jsonl").write_text("".join(lines))
    with serving(tmp_path) as base:
        tab = Tab(browser.new_context(viewport={"width": 1280, "height": 900}), base)
        for address, there in LARGE.items():
            began = time.monotonic()
            tab.go(address, there)
            took = time.monotonic() - began
            print(f"{took:.2f} s {address[:60]}")
            assert took < 5
        assert tab.complaints == []
