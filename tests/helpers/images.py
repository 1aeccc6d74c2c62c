"""Real builds of images, by buildah without a daemon, on a base that is made here from Debian packages.

No registry is needed: the base is this machine's Debian release with its Python under /usr/local, like the
official Python images. The Debian part is made once and kept in the user's cache. Where buildah cannot be
installed (this takes root and apt-get), the tests fail and say why.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from debian import install
from real_parts import used

ROOT = Path(__file__).parents[2]
TOOLS = ("buildah", "mmdebstrap")
# Python's own modules link with these libraries; torch brings its own.
LIBRARIES = ",".join(
    [
        "ca-certificates",
        "libbz2-1.0",
        "libexpat1",
        "libffi8",
        "liblzma5",
        "libncursesw6",
        "libreadline8",
        "libsqlite3-0",
        "libssl3",
        "libuuid1",
        "zlib1g",
    ]
)
BASE = """
FROM scratch
ADD system.tar /
COPY python /usr/local
RUN ldconfig && python3.12 -c 'import ctypes, lzma, sqlite3, ssl'
"""
BUILD_SECONDS = 1500.0


class Images:
    """A separate store of images."""

    def __init__(self, store: Path) -> None:
        self._command = ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run")]
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
        self.base = "localhost/base"

    def __call__(self, *arguments: str, timeout: float = BUILD_SECONDS) -> str:
        return _run([*self._command, *arguments], timeout, self._environment)

    def build(self, name: str, secrets: Path) -> str:
        """Run `docker/build.sh NAME` on the base; returns its output."""
        conf = secrets / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in _pip_settings().items()))
        builder = " ".join([*self._command, "bud --format docker --layers=false --network host"])
        options = ["--build-arg", f"BASE_IMAGE={self.base}", "--secret", f"id=pip.conf,src={conf}"]
        options += ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"]
        environment = {**self._environment, "BUILDER": builder}
        return _run(["docker/build.sh", name, *options], BUILD_SECONDS, environment)


@contextmanager
def store(directory: Path) -> Iterator[Images]:
    """Context of a store that has the base image, and is removed at the end."""
    install(TOOLS, TOOLS)
    images = Images(directory)
    try:
        _make_base(images, directory / "base")
        used("image")
        yield images
    finally:
        images("rm", "--all")
        images("rmi", "--all", "--force")


def _make_base(images: Images, context: Path) -> None:
    context.mkdir()
    shutil.copy(_system(), context / "system.tar")
    python = context / "python"
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (python / "bin").mkdir(parents=True)
    (python / "lib").mkdir()
    shutil.copy(prefix / "bin" / version, python / "bin")
    (python / "bin" / "python3").symlink_to(version)
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy(library, python / "lib", follow_symlinks=False)
    unwanted = shutil.ignore_patterns("site-packages", "test", "config-*", "__pycache__", "idlelib")
    shutil.copytree(prefix / "lib" / version, python / "lib" / version, ignore=unwanted, symlinks=True)
    (context / "Dockerfile").write_text(BASE)
    images("bud", "--network", "host", "--layers=false", "--tag", images.base, str(context))


def _system() -> Path:
    """A tar file of this machine's Debian release in its smallest form, from the cache."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    key = hashlib.sha256(LIBRARIES.encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo" / "images"
    file = cache / f"{release}-{key}.tar"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.tar")
        try:
            _run(
                ["mmdebstrap", "--variant=minbase", f"--include={LIBRARIES}", release, str(part)],
                BUILD_SECONDS,
            )
            part.rename(file)
        finally:
            part.unlink(missing_ok=True)
    return file


def _pip_settings() -> dict[str, str]:
    """This machine's settings of pip that are valid inside an image, too."""
    listed = _run([sys.executable, "-m", "pip", "config", "list"], 60)
    found = dict(line.split("=", 1) for line in listed.splitlines())
    known = {key.rsplit(".", 1)[1]: value.strip("'") for key, value in found.items()}
    local = ("file:", "/opt", "/home", "/root")
    wanted = {key: known[key] for key in ("index-url", "extra-index-url", "cert", "proxy") if key in known}
    return {key: value for key, value in wanted.items() if not value.startswith(local)}


def _run(command: list[str], timeout: float, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{said[-4000:]}"
    return done.stdout
