"""Five tasks of our own in AppWorld's layout, made by its own package: run by its Python, `appworld install` done.

    python appworld_tiny.py FOLDER

FOLDER then has `data/` as `appworld download data` leaves it: one supervisor, four scenarios (questions, one of
them in two variants, and a note to write), their databases, evaluations and solutions.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(sys.argv[1]).resolve()
os.environ["APPWORLD_ROOT"] = str(ROOT)

from appworld.apps import get_all_apps  # noqa: E402
from appworld.apps.api_lib import clear_local_dbs_cache, save_local_dbs, set_local_dbs  # noqa: E402
from appworld.collections.api_docs import ApiDocCollection  # noqa: E402
from appworld.collections.models import ModelCollection  # noqa: E402

SUPERVISOR = {"first_name": "Ada", "last_name": "Moss", "email": "ada.moss@example.com", "phone_number": "5550100100"}
BIRTHDAY, PASSWORD = "1990-04-05", "plover-42"
ASKED = """
def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("the answer is the supervisor's own"):
        test.answer(json.loads(models.end.supervisor.Task.first().answer), ground_truth_answer)
    with test("no note was written"):
        test.case(models.end.simple_note.Note.count(), "==", 0)
"""
WRITTEN = """
def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("there is one note"):
        test.case(models.end.simple_note.Note.count(), "==", 1)
    with test("its title is right"):
        test.case(models.end.simple_note.Note.first().title, "==", public_data["title"])
"""
ASK = """
def solution(apis, requester):
    apis.supervisor.complete_task(answer=apis.supervisor.show_profile()["{key}"])
"""
WRITE = """
def solution(apis, requester):
    password = apis.supervisor.show_account_passwords()[0]["password"]
    token = apis.simple_note.login(username="ada.moss@example.com", password=password)["access_token"]
    apis.simple_note.create_note(title="Shopping", content="figs", access_token=token)
    apis.supervisor.complete_task()
"""


def main() -> None:
    apps = [*get_all_apps(skip_admin=True), "admin"]
    base = ROOT / "data" / "base_dbs"
    base.mkdir(parents=True)
    set_local_dbs(to_db_home_path=":memory:test", app_names=apps, create=True)
    world = ModelCollection.load(to_db_home_path=":memory:test", load_apps=apps)
    world.admin.MainUser(**SUPERVISOR, birthday=BIRTHDAY, sex="female").save()
    person = {key: SUPERVISOR[key] for key in ("first_name", "last_name", "email")}
    world.simple_note.User(**person, password=PASSWORD, verified=True).save()
    save_local_dbs(":memory:test", str(base), "full", apps, delete_if_exists=True)
    clear_local_dbs_cache()
    docs = ROOT / "data" / "api_docs" / "standard"
    docs.mkdir(parents=True)
    for app, apis in ApiDocCollection.build(tuple(get_all_apps(skip_admin=True)), include_response_schemas=True).items():
        marked = {name: {**doc, "canary_string": ""} for name, doc in apis.items()}
        (docs / f"{app}.json").write_text(json.dumps(marked))
    asked = [("what is your email?", "email"), ("what is your last name?", "last_name")]
    for number, (question, key) in enumerate(asked, 1):
        make(f"aaaaaaa_{number}", f"Tell me: {question}", 1, ASKED, ASK.format(key=key), SUPERVISOR[key])
    make("bbbbbbb_1", "Write a note called Shopping that says figs.", 2, WRITTEN, WRITE, None, {"title": "Shopping"})
    make("ccccccc_1", "Tell me: what is your first name?", 1, ASKED, ASK.format(key="first_name"), SUPERVISOR["first_name"])
    make("ddddddd_1", "Tell me: what is your number?", 3, ASKED, ASK.format(key="phone_number"), SUPERVISOR["phone_number"])
    sets = {
        "train": ["aaaaaaa_1", "aaaaaaa_2"],
        "dev": ["bbbbbbb_1"],
        "test_normal": ["ccccccc_1"],
        "test_challenge": ["ddddddd_1"],
    }
    (ROOT / "data" / "datasets").mkdir()
    for name, ids in sets.items():
        (ROOT / "data" / "datasets" / f"{name}.txt").write_text("\n".join(ids))


def make(name: str, instruction: str, difficulty: int, evaluation: str, solution: str, answer: Any, public: Any = None) -> None:
    """One task: its specification, its databases (what differs from the base) and its ground truth."""
    folder = ROOT / "data" / "tasks" / name
    truth = folder / "ground_truth"
    truth.mkdir(parents=True)
    about = {"instruction": instruction, "supervisor": SUPERVISOR, "datetime": "2023-05-18T12:00:00", "db_version": "0.1.0"}
    (folder / "specs.json").write_text(json.dumps(about))
    apps = [*get_all_apps(skip_admin=True), "admin"]
    held = f":memory:task_input-{name}"
    models = ModelCollection.load(held, str(ROOT / "data" / "base_dbs"), load_apps=apps)
    models.supervisor.Supervisor(**SUPERVISOR, birthday=BIRTHDAY, sex="female").save()
    owner = models.supervisor.Supervisor.first().id
    models.supervisor.Task(supervisor_id=owner, instruction=instruction).save()
    models.supervisor.AccountPassword(supervisor_id=owner, account_name="simple_note", password=PASSWORD).save()
    save_local_dbs(held, str(folder / "dbs"), "changes", apps, delete_if_exists=True, save_model_hashes=True)
    clear_local_dbs_cache()
    tests = [line.split('"')[1] for line in evaluation.splitlines() if "with test(" in line]
    files = {
        "metadata.json": {"difficulty": difficulty, "mode": "full", "num_apps": 1, "num_apis": 2, "num_solution_code_lines": 2},
        "answer.json": answer, "private_data.json": {},
        "public_data.json": public or {}, "required_apps.json": ["simple_note"] if public else [],
        "test_data.json": [{"requirement": text, "label": "no_op_fail"} for text in tests],
    }  # fmt: skip
    for file, content in files.items():
        (truth / file).write_text(json.dumps(content))
    (truth / "evaluation.py").write_text("import json\n" + evaluation)
    for file in ("solution.py", "compiled_solution.py"):
        (truth / file).write_text(solution)


if __name__ == "__main__":
    main()
