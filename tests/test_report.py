"""The report: what it says, how it exits, and what it keeps to itself."""

import json
import subprocess
import sys

import pytest

import fusedops
from fusedops.cli import main, report

SECTIONS = ["versions", "hardware", "backends", "build", "settings"]


def test_json_holds_every_section(capsys):
    assert main(["report", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == SECTIONS
    assert facts["backends"]["reference"] == "yes"
    assert facts["versions"]["fusedops"] == fusedops.__version__


def test_every_backend_runs_or_says_why():
    assert set(report.collect()["backends"]) == {"native", "triton", "apex", "reference"}
    assert all(len(reason) > 2 for reason in report.collect()["backends"].values())


def test_require_names_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(
        report, "backends", lambda: {"native": None, "triton": "no driver", "apex": "absent", "reference": None}
    )
    assert main(["report", "--require", "native"]) == 0
    assert main(["report", "--require", "native,triton"]) == 1
    assert "triton: no driver" in capsys.readouterr().err


def test_require_refuses_an_unknown_backend(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--require", "cutlass"])
    assert stopped.value.code == 2
    assert "expected some of native, triton, apex, reference, got cutlass" in capsys.readouterr().err


def test_settings_show_the_environment(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert report.collect()["settings"]["TORCH_CUDA_ARCH_LIST"] == "9.0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA_HOME  /home/ada/cuda", "CUDA_HOME  ~/cuda"),
        ("cd /home/ada/src && pip", "cd ~/src && pip"),
        ("/home/adalbert/x", "~/x"),
        ("/scratch/ada/cuda", "/scratch/<user>/cuda"),
        ("/Users/bob/x and C:\\Users\\bob\\x", "~/x and ~\\x"),
        ("an adaptive step for ada", "an adaptive step for ada"),
    ],
)
def test_the_issue_block_names_nobody(text, expected):
    assert report.sanitise(text, "/home/ada", "ada") == expected


def test_a_home_outside_home_is_hidden_too():
    assert report.sanitise("/data/people/eve/x", "/data/people/eve", "eve") == "~/x"
    assert report.sanitise("/usr/lib", "/", "") == "/usr/lib"


def test_issue_prints_markdown(capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/srv/people/zebedee")
    monkeypatch.setenv("CUDA_HOME", "/srv/people/zebedee/cuda")
    assert main(["report", "--issue"]) == 0
    block = capsys.readouterr().out
    assert "```text" in block
    assert "~/cuda" in block
    assert "zebedee" not in block


def test_the_table_and_the_function_print_everything(capsys):
    assert main(["report"]) == 0
    table = capsys.readouterr().out
    fusedops.report()
    text = capsys.readouterr().out
    for section in SECTIONS:
        assert section in table
        assert section in text


def test_a_missing_extra_breaks_only_its_command(capsys, monkeypatch):
    monkeypatch.setattr(report, "collect", lambda: __import__("rich.not_there"))
    assert main(["report"]) == 2
    assert "pip install 'fusedops[cli]'" in capsys.readouterr().err


def test_help_imports_no_other_subcommand():
    code = (
        "import sys; from fusedops.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print([n for n in ('parity', 'bench', 'train') if 'fusedops.cli.' + n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]")
    assert all(command in done.stdout for command in ("report", "parity", "bench", "train"))
