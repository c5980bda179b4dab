"""The results of a run as one JUnit XML file, for CI.

The format knows neither "interrupted" nor "not run". Both are written as `<error>` with that as its `type`: written as skipped,
a run that was cut short would look as if all was well.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from agentrl.testing.verdict import Case, FileResult

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Sequence[FileResult], began: datetime) -> str:
    """The XML: a `testsuite` per file, with its cards and exit as properties; a file's own problem is a case called "[file]"."""
    root = ET.Element("testsuites", name="agentrl test")
    suites = [_suite(result, began) for result in results]
    root.extend(suites)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", f"{sum(result.seconds or 0.0 for result in results):.3f}")
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text.decode() + "\n"


def _suite(result: FileResult, began: datetime) -> ET.Element:
    suite = ET.Element("testsuite", name=_xml(result.file), timestamp=began.isoformat(), hostname=socket.gethostname())
    properties = ET.SubElement(suite, "properties")
    for name, value in (("gpus", str(result.gpus)), ("cards", ",".join(map(str, result.cards))), ("log", result.log or "")):
        ET.SubElement(properties, "property", name=name, value=_xml(value))
    for case in result.cases:
        suite.append(_case(result.file, case))
    if result.problem is not None:
        own = ET.SubElement(
            suite, "testcase", classname=_class(result.file, ""), name="[file]", file=_xml(result.file), time="0.000"
        )
        ET.SubElement(own, "error", type="file", message=_xml(result.problem)).text = _xml(result.at)
    suite.set("tests", str(len(suite.findall("testcase"))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("time", f"{result.seconds or 0.0:.3f}")
    return suite


def _case(file: str, case: Case) -> ET.Element:
    above, _, name = case.name.rpartition("::") if "[" not in case.name else _parametrized(case.name)
    found = ET.Element("testcase", classname=_class(file, above), name=_xml(name), file=_xml(file), time=f"{case.seconds:.3f}")
    if case.properties:
        properties = ET.SubElement(found, "properties")
        for key, value in case.properties:
            ET.SubElement(properties, "property", name=_xml(key), value=_xml(value))
    if case.outcome == "failed":
        tag = "failure" if case.phase == "call" else "error"  # as pytest: what failed outside of the test itself is an error
        ET.SubElement(found, tag, type=case.phase, message=_xml(case.reason)).text = _xml(case.text)
    elif case.outcome in ("interrupted", "not run"):
        ET.SubElement(found, "error", type=case.outcome, message=_xml(f"{case.outcome}: {case.reason}"))
    elif case.outcome in ("skipped", "xfailed"):
        ET.SubElement(found, "skipped", type=f"pytest.{case.outcome}", message=_xml(case.reason))
    for head, text in case.output:
        tag = "system-err" if "stderr" in head else "system-out"
        ET.SubElement(found, tag).text = _xml(f"--- {head} ---\n{text}")
    return found


def _parametrized(name: str) -> tuple[str, str, str]:
    """Split before the last "::" that is not a parameter's."""
    head, bracket, parameters = name.partition("[")
    above, colons, own = head.rpartition("::")
    return above, colons, own + bracket + parameters


def _class(file: str, above: str) -> str:
    """`tests.gpu.test_engine.TestX`"""
    return _xml(".".join([*Path(file).with_suffix("").parts, *(part for part in above.split("::") if part)]))


def _xml(text: str) -> str:
    """Without characters that no XML may have, which terminals' colours are full of."""
    return _NOT_XML.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
