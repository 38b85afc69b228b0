"""What pip accepts beside the wheel, and the container file, which is built nowhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import cpython_tags
from packaging.utils import parse_wheel_filename

from offload.app.environment import TESTED
from tests.wheel import processor, serves

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTAINER = ROOT / "examples/Dockerfile"
LINTER = Path(sys.executable).with_name("hadolint")


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0"])
@pytest.mark.parametrize("build", ["", "+cpu", "+cu126", "+cu130", "+rocm7.1"])
def test_any_build_of_a_tested_torch_stays(version: str, build: str) -> None:
    """Otherwise pip would replace it by the one of PyPI, which may lack this card."""
    (torch,) = (each for each in map(Requirement, PROJECT["project"]["dependencies"]) if each.name == "torch")
    assert torch.specifier.contains(version + build)
    oldest, newest = TESTED["torch"]
    assert oldest == str(torch.specifier).removeprefix(">="), "the oldest tested one, and no newest"
    assert f"torch=={newest}." in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_pythons_and_processors(python: str) -> None:
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
    for machine in ("x86_64", "aarch64"):
        about = {"python_version": python, "platform_machine": machine}
        for each in map(Requirement, PROJECT["project"]["dependencies"]):
            assert each.marker is None or each.marker.evaluate(about)


def test_a_wheel_serves_later_pythons() -> None:
    """nanobind makes such a module if CMake looks for the part of Python that scikit-build names from 3.12 on."""
    assert PROJECT["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
    build = (ROOT / "CMakeLists.txt").read_text()
    assert "${SKBUILD_SABI_COMPONENT}" in build
    assert re.search(r"nanobind_add_module\(_core STABLE_ABI", build)
    assert "add_compile_options(-include cstdio)" in build, "clang's library does not bring it to nanobind"


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("offload-0.1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", ["3.11.7"]),
        ("offload-0.1.0-cp312-abi3-manylinux_2_17_aarch64.whl", ["3.12.1", "3.13.0", "3.14.10"]),
    ],
)
def test_a_wheel_is_tried_by_the_pythons_that_pip_installs_it_for(name: str, versions: list[str]) -> None:
    """pip's own rule, by `packaging`."""
    _, _, _, tags = parse_wheel_filename(name)
    for version in ("3.11.7", "3.12.1", "3.13.0", "3.14.10"):
        python = tuple(map(int, version.split(".")[:2]))
        platforms = [each.platform for each in tags]
        accepted = any(each in tags for each in cpython_tags(python, platforms=platforms))
        assert serves(Path(name), version) == accepted == (version in versions)
    assert processor(Path(name)) in platforms[0]


def instructions() -> list[tuple[str, str]]:
    """Return (word, rest) of each instruction, comments and line ends removed."""
    text = re.sub(r"^#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [(word, rest) for word, rest in pairs]


def test_the_container_installs_what_the_clone_has() -> None:
    steps = instructions()
    assert [word for word, _ in steps][:2] == ["ARG", "FROM"], "the CUDA of the base is an argument"
    defaults = dict(rest.split("=") for word, rest in steps if word == "ARG")
    assert steps[1][1] == "nvidia/cuda:${CUDA}-base-ubuntu24.04"
    assert f"torch=={defaults['TORCH']}\n" in (ROOT / "constraints.txt").read_text()
    copied: set[str] = set()
    for word, rest in steps:
        names = set(re.findall(r"\$\{?([A-Z]+)", rest))
        assert names <= {*defaults, "PATH"}, f"{word} {rest}"
        if word == "COPY":
            sources = shlex.split(rest)[:-1]
            copied |= set(sources)
            assert all((ROOT / source).exists() for source in sources)
    project = PROJECT["project"]
    needed = {"pyproject.toml", "CMakeLists.txt", "csrc", "offload", "constraints.txt", project["readme"]}
    assert needed | set(project["license-files"]) == copied
    assert json.loads(dict(steps)["ENTRYPOINT"]) == list(project["scripts"])
    assert json.loads(dict(steps)["CMD"]) == ["doctor"]
    assert dict(steps)["USER"] != "root"


@pytest.mark.skipif(not LINTER.exists(), reason="hadolint has no package for this processor")
def test_the_linter_accepts_the_container() -> None:
    done = subprocess.run([LINTER, "--no-color", CONTAINER], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
