"""An environment of Harbor for the tests: bubblewrap with this machine's programs, for trusted commands.

The server of tmux must outlive the command that starts it, so processes share a namespace.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

DIRECTORIES = ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "tmp", "root")
SYSTEM = ("usr", "bin", "lib", "lib64", "etc")


class Bubblewrap(BaseEnvironment):
    @staticmethod
    def type():
        return "bubblewrap"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in DIRECTORIES:
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    async def upload_file(self, source_path, target_path):
        target = self._at(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, target)

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        system = [("--ro-bind", f"/{name}", f"/{name}") for name in SYSTEM if Path("/", name).exists()]
        own = [("--bind", str(path), f"/{path.name}") for path in self.root.iterdir()]
        variables = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", **(env or {})}
        values = [("--setenv", name, value) for name, value in variables.items()]
        options = [word for part in (*system, *own, *values) for word in part]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-net", "--clearenv", "--proc", "/proc", "--dev", "/dev", *options),
            *("--chdir", cwd or "/app", "bash", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)

    def _at(self, path):
        return self.root / str(path).lstrip("/")
