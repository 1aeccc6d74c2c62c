"""Real builds of images, by buildah without a daemon, on a base that is made here from Debian packages.

No registry is needed: the base is this machine's Debian release with its Python under /usr/local, like the
official Python images. The base and the image's layers are kept in the user's cache: the layer of
dependencies is built again only when its inputs have changed. Where buildah cannot be installed (this takes
root and apt-get), the tests fail and say why.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.machine.debian import install
from helpers.paths import ROOT
from helpers.suite.real_parts import used

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
DEPENDENCIES = (
    "constraints.txt",
    "pyproject.toml",
    "megatron_gvpo/__init__.py",
    "megatron_gvpo/versions.txt",
    "docker/cpu.Dockerfile",
)
BUILD_SECONDS = 1500.0


MOST_IMAGES = 500  # a store with more images, of old versions of the code, is deleted


class Images:
    """A separate store of images."""

    def __init__(self, store: Path) -> None:
        self._command = ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run")]
        self._environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
        self.base = "localhost/base"

    def count(self) -> int:
        """The number of images and layers."""
        return len(self("images", "--all", "--quiet").splitlines())

    def __call__(self, *arguments: str, timeout: float = BUILD_SECONDS) -> str:
        return _run([*self._command, *arguments], timeout, self._environment)

    def build(self, name: str, secrets: Path) -> str:
        """Run `docker/build.sh NAME` on the base; returns its output."""
        conf = secrets / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in _pip_settings().items()))
        builder = " ".join([*self._command, "bud --format docker --layers --network host"])
        options = ["--build-arg", f"BASE_IMAGE={self.base}", "--secret", f"id=pip.conf,src={conf}"]
        options += ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"]
        environment = {**self._environment, "BUILDER": builder}
        return _run(["docker/build.sh", name, *options], BUILD_SECONDS, environment)


@contextmanager
def store() -> Iterator[Images]:
    """Context of the store in the user's cache, with the base image; containers are removed at the end.

    One process at a time uses the store, and another one waits. Stores of another format are deleted.
    """
    install(TOOLS, TOOLS)
    folder = _cache() / f"store-{_key(LIBRARIES, BASE, sys.version, *(_text(file) for file in DEPENDENCIES))}"
    with _locked(folder):
        for other in _cache().glob("store-*[0-9a-f]"):
            if other != folder:
                with suppress(BlockingIOError), _locked(other, fcntl.LOCK_NB):
                    _remove(other)
        images = Images(folder)
        if folder.exists() and images.count() > MOST_IMAGES:
            _remove(folder)
        if not (folder / "base").exists():
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory() as context:
                _make_base(images, Path(context) / "base")
            (folder / "base").touch()
        used("image")
        try:
            yield images
        finally:
            images("rm", "--all")


@contextmanager
def _locked(folder: Path, how: int = 0) -> Iterator[None]:
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def _remove(store: Path) -> None:
    """Unmounts what a killed builder has left mounted inside a store, and removes the store."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([mount for mount in mounted if Path(mount).is_relative_to(store)]):
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(store)


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo" / "images"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _text(file: str) -> str:
    return (ROOT / file).read_text()


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


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
    file = _cache() / f"{release}-{_key(LIBRARIES)}.tar"
    if not file.exists():
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
    settings = dict(line.split("=", 1) for line in listed.splitlines())
    known = {key.rsplit(".", 1)[1]: value.strip("'") for key, value in settings.items()}
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
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{output[-4000:]}"
    return done.stdout
