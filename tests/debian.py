"""Debian unstable in a folder: its newest Python, numpy, and a torch for CPUs alone.

Needs apt and its keys, and no root. 250 MB come from Debian. Another processor is emulated by qemu-user.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main\n"


def unpack(folder: Path, machine: str) -> None:
    """Unpack packages into `folder`, if it is not there. Raises CalledProcessError."""
    if folder.exists():
        return
    own = folder.with_suffix(".apt")
    for name in ("lists/partial", "archives/partial", "preferences.d"):
        (own / name).mkdir(parents=True, exist_ok=True)
    (own / "status").touch()
    (own / "sources.list").write_text(SOURCE)
    options = {
        "APT::Architecture": ARCHITECTURES[machine],
        "APT::Architectures": ARCHITECTURES[machine],
        "APT::Install-Recommends": "false",
        "Acquire::Languages": "none",
        "Dir::State::Lists": own / "lists",
        "Dir::State::Status": own / "status",
        "Dir::Cache": own,
        "Dir::Cache::Archives": own / "archives",
        "Dir::Etc::SourceList": own / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": own / "preferences.d",
    }
    apt = ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*apt, "install", "--download-only", "-y", "python3-torch"], check=True, stdout=subprocess.DEVNULL)
    made = folder.with_suffix(".new")
    for name in ("bin", "lib", "lib64"):
        (made / "usr" / name).mkdir(parents=True, exist_ok=True)
        (made / name).symlink_to(f"usr/{name}")
    for package in sorted((own / "archives").glob("*.deb")):
        files = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
        # A device or an owner that only root may make is in no package that Python needs.
        words = ["tar", "-x", "-C", made, "--keep-directory-symlink", "--no-same-owner", "--exclude=./usr/share/*"]
        subprocess.run(words, stdin=files.stdout, check=False, stderr=subprocess.DEVNULL)
        files.wait()
    made.rename(folder)


def python(folder: Path, machine: str, site: Path) -> list[str | Path]:
    """Return the words that start this Python, with the packages in `site` before its own."""
    folder = folder.resolve()
    libraries = folder / "usr/lib" / f"{machine}-linux-gnu"
    path = ":".join(map(str, (libraries, libraries / "blas", libraries / "lapack", folder / "usr/lib")))
    own = {"PYTHONHOME": f"{folder}/usr", "PYTHONPATH": f"{site}:{folder}/usr/lib/python3/dist-packages"}
    starts: Sequence[str | Path]
    if machine == platform.machine():
        starts = [next(libraries.glob("ld-linux-*")), "--library-path", path]
    else:
        starts = [f"qemu-{machine}-static", "-L", folder, "-E", f"LD_LIBRARY_PATH={path}"]
    variables = [f"{name}={value}" for name, value in own.items()]
    return ["env", *variables, *starts, folder / "usr/bin/python3"]
