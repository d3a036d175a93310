"""``freetoken agent``: what each agent is told, and what happens when something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from freetoken.cli.agent import private_directory, read_model
from freetoken.cli.agents import AGENTS, agent_named
from freetoken.cli.agents.client import KEY_VARIABLE, ServedModel
from freetoken.cli.main import main
from freetoken.errors import ConfigError, FreeTokenError

MODEL = ServedModel("http://127.0.0.1:9", "tiny/one", 65_536, 65_535, "sk-secret")
ENTRY = {"id": "tiny", "context_window": 65_536, "max_output_tokens": 65_535}


@dataclass
class Server:
    """What a server answers; ``key`` is what it wants."""

    url: str = ""
    key: str = ""
    health: tuple[int, Any] = (200, {"status": "ready"})
    models: tuple[int, Any] = (200, {"data": [ENTRY, {**ENTRY, "id": "other"}]})
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            if self.path == "/health":
                status, body = state.health
            elif state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
                status, body = 401, {"error": {}}
            else:
                status, body = state.models
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        state.url = f"http://127.0.0.1:{listening.server_port}"
        yield state
        listening.shutdown()
        thread.join()


# ------------------------------------------------------------------------------------------------- the server


def test_the_model_comes_from_the_server(server: Server) -> None:
    for url in (server.url, server.url + "/", server.url + "/v1"):
        assert read_model(url) == ServedModel(server.url, "tiny", 65_536, 65_535)
    assert read_model(server.url, name="other").name == "other"


def test_a_key_is_sent(server: Server) -> None:
    server.key = "sk-1"
    assert read_model(server.url, "sk-1").key == "sk-1"
    for key in ("", "sk-2"):
        with pytest.raises(FreeTokenError, match=r"--api-key.*FREETOKEN_API_KEY"):
            read_model(server.url, key)


def test_what_is_wrong_with_a_server_is_said(server: Server) -> None:
    server.health = (503, {"status": "loading", "detail": "reading weights"})
    with pytest.raises(FreeTokenError, match=r"not ready.*loading: reading weights"):
        read_model(server.url)
    server.health = (404, "not found")  # not every server has it
    with pytest.raises(ConfigError, match=r"'nosuch'.*tiny, other"):
        read_model(server.url, name="nosuch")
    for models in ((404, {}), (200, {"data": []}), (200, "text"), (500, None)):
        server.models = models
        with pytest.raises(FreeTokenError, match="names no model"):
            read_model(server.url)
    server.models = (200, {"data": [{"id": "tiny"}]})
    with pytest.raises(FreeTokenError, match="does not tell the context"):
        read_model(server.url)


def test_no_server(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FreeTokenError, match=r"no server answers at http://127.0.0.1:9 .*freetoken launch.*--url"):
        read_model("http://127.0.0.1:9")
    for url in ("127.0.0.1:8321", "ftp://host", "http://host:port"):
        with pytest.raises(ConfigError, match="--url"):
            read_model(url)
    assert main(["agent", "codex", "--url", "http://127.0.0.1:9", "--program", sys.executable]) == 1
    assert "no server answers" in capfd.readouterr().err


def test_an_agent_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for name in AGENTS:
        assert main(["agent", name]) == 1
        error = capfd.readouterr().err
        assert f"{agent_named(name).title} is not installed" in error and agent_named(name).install in error
    assert main(["agent", "codex", "--program", "/nonexistent/codex"]) == 2
    assert "--program" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------ what is set


@pytest.mark.parametrize("name", AGENTS)
def test_keys_stay_out_of_files_and_files_in_the_directory(name: str, tmp_path: Path) -> None:
    setup = agent_named(name).prepare(MODEL, tmp_path)
    assert "sk-secret" in setup.environment.values()
    for path, text in [*setup.files.items(), *setup.first_files.items()]:
        assert path.is_relative_to(tmp_path) and "sk-secret" not in text
    assert str(tmp_path) in "".join(setup.environment.values())
    assert agent_named(name).prepare(ServedModel(MODEL.url, "m", 10, 9), tmp_path).environment  # no key at all


def test_claude(tmp_path: Path) -> None:
    setup = agent_named("claude").prepare(MODEL, tmp_path)
    environment = setup.apply({"ANTHROPIC_API_KEY": "sk-ant", "CLAUDE_CODE_USE_BEDROCK": "1", "PATH": "/bin"})
    assert environment["PATH"] == "/bin"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK"} & environment.keys()
    assert environment["ANTHROPIC_BASE_URL"] == MODEL.url
    assert environment["ANTHROPIC_AUTH_TOKEN"] == "sk-secret"
    assert environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == environment["ANTHROPIC_MODEL"] == "tiny/one"
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    setup.write()
    mine = tmp_path / ".claude.json"
    mine.write_text("changed by the agent")
    setup.write()
    assert mine.read_text() == "changed by the agent"


def test_codex(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    path = tmp_path / "config.toml"
    agent = agent_named("codex")
    agent.prepare(MODEL, tmp_path).write()
    config = tomllib.loads(path.read_text())
    assert (config["model"], config["model_provider"]) == ("tiny/one", "freetoken")
    assert config["model_context_window"] == 65_536
    assert config["model_auto_compact_token_limit"] == 65_536 - 16_384
    provider = config["model_providers"]["freetoken"]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:9/v1", "responses")
    assert provider["env_key"] == KEY_VARIABLE
    assert provider["stream_idle_timeout_ms"] >= 3_600_000
    path.write_text(path.read_text() + '\n[projects."/home/me/[x]"]\ntrust_level = "trusted"\n[[more]]\na = 1\n')
    for name in ("second", "third"):
        agent.prepare(ServedModel(MODEL.url, name, 1000, 999), tmp_path).write()
        again = tomllib.loads(path.read_text())
        assert (again["model"], again["analytics"]) == (name, {"enabled": False})
        assert (again["projects"], again["more"]) == ({"/home/me/[x]": {"trust_level": "trusted"}}, [{"a": 1}])


def test_opencode(tmp_path: Path) -> None:
    setup = agent_named("opencode").prepare(MODEL, tmp_path)
    setup.write()
    config = json.loads(Path(setup.environment["OPENCODE_CONFIG"]).read_text())
    assert config["model"] == config["small_model"] == "freetoken/tiny/one"
    provider = config["provider"]["freetoken"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:9/v1"
    assert provider["models"]["tiny/one"]["limit"] == {"context": 65_536, "output": 16_384}


def test_openclaw(tmp_path: Path) -> None:
    agent, path = agent_named("openclaw"), tmp_path / "openclaw.json"
    path.write_text(json.dumps({"meta": {"by": "OpenClaw"}, "agents": {"defaults": {"x": 1}, "list": []}}))
    agent.prepare(MODEL, tmp_path).write()
    config = json.loads(path.read_text())
    assert config["meta"] == {"by": "OpenClaw"} and config["agents"]["list"] == []
    assert config["agents"]["defaults"]["x"] == 1
    assert config["agents"]["defaults"]["model"]["primary"] == "freetoken/tiny/one"
    (entry,) = config["models"]["providers"]["freetoken"]["models"]
    assert (entry["contextWindow"], entry["maxTokens"]) == (65_536, 16_384)
    path.write_text("{not: json}")
    assert agent.prepare(MODEL, tmp_path).files


def test_dsh(tmp_path: Path) -> None:
    setup = agent_named("dsh").prepare(MODEL, tmp_path)
    (path,) = setup.files
    patch = {entry["id"]: entry["config"] for entry in json.loads(setup.files[path])}
    assert patch["agent-default-model"] == {"provider": "freetoken", "model": "tiny/one"}
    provider = patch["llm-pi-ai"]["providers"]["freetoken"]
    assert (provider["baseURL"], provider["apiKeyEnv"]) == (MODEL.url, KEY_VARIABLE)
    overlay = ["--patch", str(path)]
    assert setup.arrange(["headless", "--json", "x"]) == ["headless", *overlay, "--json", "x"]
    assert setup.arrange([]) == ["web", *overlay]
    assert setup.arrange(["--help"]) == ["web", *overlay, "--help"]


def test_the_private_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert private_directory("codex", None) == tmp_path / ".local/state/freetoken/agents/codex"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert private_directory("codex", None) == tmp_path / "state/freetoken/agents/codex"
    assert private_directory("codex", Path("~/x")) == tmp_path / "x"


# ------------------------------------------------------------------------------------------------ the command

PROGRAM = """\
#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "freetoken.cli.main", "agent", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_arguments_environment_and_status_are_passed_through(server: Server, tmp_path: Path) -> None:
    program, home = tmp_path / "codex", tmp_path / "home"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o700)
    server.key = "sk-1"
    arguments = ["exec", "--json", "a b", "--", "--url"]
    done = start(
        *("codex", "--url", server.url, "--home", str(home), "--", *arguments),
        PATH=f"{tmp_path}:{os.environ['PATH']}", FREETOKEN_API_KEY="sk-1", MINE="kept",
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    passed, environment = json.loads(done.stdout)
    assert passed == arguments
    assert (environment["MINE"], environment["CODEX_HOME"]) == ("kept", str(home))
    assert (home / "config.toml").exists() and home.stat().st_mode & 0o777 == 0o700


def test_the_environment_can_be_printed(server: Server, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    done = start("claude", "--url", server.url, "--home", str(home), "--print-env", "--", "-p", "it's me", PATH="/none")
    assert done.returncode == 0, done.stderr
    assert f"# {home / '.claude.json'}" in done.stdout and "hasCompletedOnboarding" in done.stdout
    assert done.stdout.rstrip().endswith("""# claude -p 'it'"'"'s me'""")
    seen = subprocess.run(
        ["/bin/sh", "-c", f"{done.stdout}\nenv"], capture_output=True, text=True, env={"ANTHROPIC_API_KEY": "x"}
    )
    assert f"CLAUDE_CONFIG_DIR={home}" in seen.stdout.splitlines()
    assert "ANTHROPIC_API_KEY" not in seen.stdout
