"""systemd unit, image and Kubernetes manifest agree with the server: paths, exit codes, timeouts."""

import ast
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server import app, launcher
from server.cli import parse
from server.config import ServerConfig
from server.processes import TERM_GRACE_S
from tests.deploy.proxy import DEPLOY
from tests.server.conftest import ROOT

UNIT = (DEPLOY / "sluice.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
# From SIGTERM until the process has gone, at most.
ENDING_S = ServerConfig().drain_timeout + launcher.FLUSH_S + TERM_GRACE_S
NEWER_KEYS = ("RestartSteps", "RestartMaxDelaySec")  # of systemd 254


def setting(key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


def test_systemd_restarts_only_what_a_restart_can_help() -> None:
    assert setting("Restart") == "on-failure"
    never = [int(code) for code in setting("RestartPreventExitStatus").split()]
    assert never == list(launcher.CONFIGURATION_CODES)
    assert launcher.EXIT_ENGINE_FAILURE not in never


def test_systemd_lets_the_server_drain() -> None:
    assert int(setting("TimeoutStopSec")) > ENDING_S
    assert setting("KillMode") == "mixed", "SIGTERM for all would end the engine under its requests"


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_knows_every_setting(tmp_path: Path) -> None:
    """With programs and paths that exist here, so that only the unit itself is judged."""
    unit = tmp_path / "sluice.service"
    unit.write_text(UNIT.replace("/opt/sluice/.venv/bin/python", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    about = [line for line in done.stderr.splitlines() if "sluice.service" in line]
    strange = [line for line in about if not any(key in line for key in NEWER_KEYS)]
    assert strange == []


def test_image_copies_what_the_server_imports() -> None:
    copied = set(re.findall(r"^COPY (\w+)/ /opt/sluice/\1/$", DOCKERFILE, re.MULTILINE))
    assert {"engine", "server", "tokenizer_proc", "scripts", "cuda"} <= copied
    assert all((ROOT / name).is_dir() for name in copied)


def test_image_runs_as_nobody_in_particular() -> None:
    final = DOCKERFILE.split("\nFROM ")[-1]
    assert re.search(r"^USER 10001$", final, re.MULTILINE)
    assert "pip install" not in final, "the final stage has no build step"


def test_image_starts_the_server_with_valid_flags() -> None:
    (command,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    _, script, *flags = ast.literal_eval(command)
    assert (ROOT / script).is_file()
    assert parse(flags)[0].host == "0.0.0.0"
    assert parse([*flags, "--host", "::"])[0].host == "::", "flags of `docker run` win"


def pod() -> dict[str, Any]:
    (deployment,) = (one for one in MANIFEST if one["kind"] == "Deployment")
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_kubernetes_probes_exist_and_mean_what_they_should() -> None:
    (container,) = pod()["containers"]
    paths = {
        kind: container[kind]["httpGet"]["path"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert set(paths.values()) <= app.GET.keys()
    assert paths["livenessProbe"] == paths["startupProbe"] == "/health"
    assert paths["readinessProbe"] == "/ready", "/ready is 503 while draining: no reason to kill"
    assert container["ports"][0]["containerPort"] == ServerConfig().port


def test_kubernetes_gives_time_to_drain() -> None:
    (container,) = pod()["containers"]
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    config, _ = parse(container["args"])
    assert config.drain_timeout == ServerConfig().drain_timeout
    assert pod()["terminationGracePeriodSeconds"] > int(seconds) + ENDING_S


def test_kubernetes_can_write_where_the_server_writes() -> None:
    (container,) = pod()["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    assert writable == {"/tmp", "/var/cache/sluice"}
    assert "XDG_CACHE_HOME=/var/cache " in DOCKERFILE
    assert pod()["securityContext"]["runAsUser"] == 10001, "as the image has it"


def test_kubernetes_labels_select_the_pods() -> None:
    by_kind = {one["kind"]: one["spec"] for one in MANIFEST}
    labels = by_kind["Deployment"]["template"]["metadata"]["labels"]
    assert by_kind["Deployment"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["selector"]["matchLabels"] == labels
