"""The server of the viewer: who is let in, and what attacks come to."""

import contextlib
import http.client
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import quote

import gymnasium
import pytest
from long_tests import LONG
from scripted_env import Result, ToyEnv, scripted
from starlette.testclient import TestClient
from viewer_requests import FILES, POST, cartpoles, served, viewed

from gym_trace import TraceRecordingWrapper, edit
from gym_trace.errors import TraceError
from gym_trace.tools.viewer import server
from gym_trace.tools.viewer.guard import HEADERS, is_loopback
from gym_trace.tools.viewer.server import Viewer, pages_of

SECRET = "the secret outside"
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "secret.txt").write_text(SECRET)
    return cartpoles(folder / "cartpole", 6)


@pytest.fixture
def viewer(directory: Path) -> Iterator[Viewer]:
    made = Viewer(viewed(directory), pages_of(FILES))
    yield made
    made._socket.close()


@pytest.fixture
def stranger(viewer: Viewer) -> Iterator[TestClient]:
    """A browser without the token."""
    with TestClient(viewer.app, base_url=f"http://127.0.0.1:{viewer.port}", follow_redirects=False) as client:
        yield client


@pytest.fixture
def browser(viewer: Viewer, stranger: TestClient) -> TestClient:
    """A browser whose page has the token."""
    stranger.headers["Authorization"] = f"Bearer {viewer.url.partition('token=')[2]}"
    return stranger


# -- the token --------------------------------------------------------------------------------------------------------


def test_the_token_is_in_no_cookie_which_servers_on_other_ports_would_get(viewer: Viewer, stranger: TestClient) -> None:
    answer = stranger.get(viewer.url.partition(str(viewer.port))[2])
    assert answer.content == FILES["index.html"]
    assert "set-cookie" not in answer.headers
    token = viewer.url.partition("token=")[2]
    for name in ("token", f"gym-trace-{viewer.port}"):
        assert stranger.get("/api/traces", headers={"Cookie": f"{name}={token}"}).status_code == 403


@pytest.mark.parametrize("path", ["/api/traces", "/api/changes?since=0", "/nothing"])
def test_nothing_but_the_empty_page_is_shown_without_the_token(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403
    assert "token" in answer.json()["error"]
    assert [stranger.get(f"/{name}").content for name in FILES] == list(FILES.values())


@pytest.mark.parametrize("token", ["", "wrong", "é", "a" * 5000, "%00", "0", SCRIPT])
def test_a_wrong_token_is_refused(stranger: TestClient, token: str) -> None:
    assert stranger.get(f"/api/traces?token={quote(token)}" + "&a=b" * 30).status_code == 403
    assert stranger.get("/api/traces", headers={"Authorization": f"Bearer {token}".encode()}).status_code == 403


def test_a_program_shows_the_token_in_a_header(viewer: Viewer, stranger: TestClient) -> None:
    token = viewer.url.partition("token=")[2]
    assert stranger.get("/api/traces", headers={"Authorization": f"Bearer {token}"}).status_code == 200


def test_two_servers_have_two_tokens(directory: Path) -> None:
    urls = set()
    for _ in range(2):
        viewer = Viewer(viewed(directory), pages_of(FILES))
        urls.add(viewer.url.partition("token=")[2])
        viewer._socket.close()
    assert len(urls) == 2
    assert min(map(len, urls)) >= 32


def test_a_close_look_ends_with_the_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, over = Event(), Event()

    def look(go_on: Any) -> None:
        began.set()
        with contextlib.suppress(TraceError):
            while True:
                go_on(0, 1)
        over.set()

    answers = viewed(directory)
    monkeypatch.setattr(answers, "look_closely", look)
    with served(answers):
        assert began.wait(60)
    assert over.is_set()


# -- other sites ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "",
        "10.0.0.1:{port}",
        "[::2]:{port}",
        "127.0.0.1:{port}.evil.example",
        "127.0.0.1@evil.example:{port}",
        "0x7f.1:{port}",
    ],
)
def test_a_name_that_was_pointed_here_is_refused(viewer: Viewer, browser: TestClient, host: str) -> None:
    answer = browser.get("/api/traces", headers={"Host": host.format(port=viewer.port)})
    assert answer.status_code == 403
    assert "cartpole" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}"])
def test_names_of_this_machine_are_let_in(viewer: Viewer, browser: TestClient, host: str) -> None:
    token = viewer.url.partition("token=")[2]
    headers = {"Host": host.format(port=viewer.port), "Authorization": f"Bearer {token}"}
    assert browser.get("/api/traces", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://127.0.0.1:{port}",
        "http://localhost",
        "file://",
        "",
    ],
)
def test_a_page_of_another_site_is_refused(viewer: Viewer, browser: TestClient, origin: str) -> None:
    headers = {"Origin": origin.format(port=viewer.port)}
    assert browser.get("/api/traces", headers=headers).status_code == 403
    body = {"trace": 0, "episode": 0, "identity": "", "flag": "bad"}
    assert browser.post("/api/flags", json=body, headers={**POST, **headers}).status_code == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_fetch_of_another_site_without_an_origin_is_refused(browser: TestClient, site: str) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
    assert browser.get("/api/traces", headers=headers).status_code == 403
    assert browser.get("/app.js", headers=headers).status_code == 403


def test_no_answer_invites_another_origin(browser: TestClient) -> None:
    answers = [browser.get(path) for path in ("/", "/api/traces", "/nothing", "/api/episode?episode=99")]
    answers.append(browser.options("/api/traces"))
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "PROPFIND"])
def test_other_methods_are_refused(browser: TestClient, method: str) -> None:
    assert browser.request(method, "/api/traces").status_code == 405


# -- paths ------------------------------------------------------------------------------------------------------------

TRAVERSALS = [
    f"{front}{dots * 6}{target}"
    for front in ("/", "/static/", "/api/", "//")
    for dots in (
        "../",
        "..%2f",
        "%2e%2e/",
        "%2e%2e%2f",
        "..%5c",
        "..\\",
        "%252e%252e%252f",
        "..%c0%af",
        "....//",
        "..;/",
    )
    for target in ("etc/passwd", "secret.txt")
] + [
    "/%00",
    "/app.js%00.html",
    "/../secret.txt",
    "/C:\\secret.txt",
    "//etc/passwd",
    "/file:///etc/passwd",
    "/~root",
    "/.git/config",
]


def test_no_path_reaches_a_file(directory: Path) -> None:
    with served(viewed(directory)) as viewer:
        token = viewer.url.partition("token=")[2]
        for path in TRAVERSALS:
            answer, body = raw_request(viewer.port, path, token)
            assert answer in (403, 404, 400), path
            assert SECRET.encode() not in body
            assert b"root:" not in body


def test_parameters_reach_no_file(browser: TestClient, directory: Path) -> None:
    for value in ("../../secret.txt", "/etc/passwd", str(directory), "file:///etc/passwd", "%00"):
        for name in ("trace", "episode", "column", "where", "sort", "a", "b"):
            given = {"trace": "0", "episode": "0", "column": "observations", name: value}
            for path in ("episodes", "episode", "plot", "frames", "steps", "compare", "histograms", "learning", "runs"):
                answer = browser.get(f"/api/{path}", params=given)
                assert answer.status_code in (200, 400, 404)
                assert SECRET not in answer.text
                assert "root:" not in answer.text


def raw_request(port: int, path: str, token: str, **headers: str) -> tuple[int, bytes]:
    """Send a path as it is, which clients would tidy up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection._validate_path = lambda url: None  # type: ignore[attr-defined]
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- recorded strings -------------------------------------------------------------------------------------------------


class ScriptEnv(ToyEnv):
    """Says a script wherever an environment can say something."""

    observation_space = gymnasium.spaces.Dict({SCRIPT: gymnasium.spaces.Text(64), "x": gymnasium.spaces.Discrete(2)})
    action_space = gymnasium.spaces.Discrete(2)
    spec = gymnasium.envs.registration.EnvSpec("Script-v0", entry_point="nowhere:Env")
    spec.id = f"{SCRIPT}-v0"

    def result(self, action: Any) -> Result:
        return Result({SCRIPT: SCRIPT, "x": 0}, info={SCRIPT: SCRIPT, "</script>": "\u2028\x00\ud800"})


def test_scripts_in_recorded_strings_stay_json(tmp_path: Path) -> None:
    directory = tmp_path / "<img src=x onerror=alert(1)>"
    with TraceRecordingWrapper(
        ScriptEnv(), directory, record_infos=True, metadata={SCRIPT: SCRIPT}, split=SCRIPT
    ) as env:
        env.reset(seed=0, options={SCRIPT: SCRIPT})
        env.annotate(**{SCRIPT: SCRIPT})
        for _ in range(3):
            env.step(0)
    edit.annotate(directory, {SCRIPT: SCRIPT, "description": SCRIPT})
    viewer = Viewer(viewed(directory), pages_of(FILES))
    with TestClient(viewer.app, base_url=f"http://127.0.0.1:{viewer.port}") as client:
        client.headers["Authorization"] = f"Bearer {viewer.url.partition('token=')[2]}"
        said = ""
        for path in (
            *("/api/traces", "/api/episodes", "/api/histograms", "/api/episode?episode=0", "/api/steps?episode=0"),
            f"/api/episodes?where={quote(SCRIPT)}",
            f"/api/plot?episode=0&column={quote(SCRIPT)}",
            f"/{quote(SCRIPT)}",
        ):
            answer = client.get(path)
            assert answer.headers["content-type"] in ("application/json", "application/x-gym-trace"), path
            assert answer.headers["x-content-type-options"] == "nosniff"
            if answer.headers["content-type"] == "application/json":
                json.loads(answer.text)
            said += answer.text
        assert SCRIPT in said
    viewer._socket.close()


# -- posts ------------------------------------------------------------------------------------------------------------


def test_a_flag_is_set_by_our_own_page_only(viewer: Viewer, browser: TestClient) -> None:
    origin = {"Origin": f"http://127.0.0.1:{viewer.port}"}
    body = {
        "trace": 0,
        "episode": 3,
        "identity": browser.get("/api/episode?episode=3").json()["identity"],
        "flag": "bad",
    }
    assert browser.post("/api/flags", json=body).status_code == 403
    assert browser.post("/api/flags", json=body, headers=origin).status_code == 403
    assert browser.post("/api/flags", json=body, headers=POST).status_code == 403
    plain = {**origin, **POST, "Content-Type": "text/plain"}
    assert browser.post("/api/flags", content=json.dumps(body), headers=plain).status_code == 415
    assert browser.get("/api/episode?episode=3").json()["flag"] is None
    done = browser.post("/api/flags", json=body, headers={**origin, **POST})
    assert done.json() == {"flag": "bad", "flags": {"good": 0, "bad": 1, "look": 0}}
    assert browser.get("/api/episode?episode=3").json()["flag"] == "bad"
    browser.post("/api/flags", json={**body, "flag": None}, headers={**origin, **POST})
    assert browser.get("/api/episode?episode=3").json()["flag"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"trace": 0}',
        b'{"trace": "0", "episode": 0, "flag": "bad"}',
        b"[" * 9000,
        b"\xff",
        b'{"trace": 0, "episode": 0, "flag": "bad"}',
        b'{"trace": 0, "episode": 0, "identity": 7, "flag": "bad"}',
        b'{"trace": 0, "episode": 0, "identity": "", "flag": "evil"}',
        b'{"trace": 9, "episode": 0, "identity": "", "flag": "bad"}',
        b'{"trace": 0, "episode": 99999, "identity": "", "flag": "bad"}',
        b'{"trace": 0, "episode": -1, "identity": "", "flag": "bad"}',
    ],
)
def test_an_invalid_flag_is_refused(viewer: Viewer, browser: TestClient, body: bytes) -> None:
    headers = {"Origin": f"http://127.0.0.1:{viewer.port}", **POST}
    answer = browser.post("/api/flags", content=body, headers=headers)
    assert answer.status_code in (400, 404, 412)
    assert answer.json()["error"]
    assert browser.get("/api/episode?episode=0").json()["flag"] is None


def test_a_large_post_is_refused_unread(viewer: Viewer, browser: TestClient) -> None:
    headers = {"Origin": f"http://127.0.0.1:{viewer.port}", **POST}
    assert browser.post("/api/flags", content=b" " * (1 << 20), headers=headers).status_code == 413


def test_a_post_of_unknown_length_is_refused_unread(viewer: Viewer, browser: TestClient) -> None:
    headers = {"Origin": f"http://127.0.0.1:{viewer.port}", **POST, "Transfer-Encoding": "chunked"}
    assert browser.post("/api/flags", content=b"{}", headers={**headers, "Content-Length": "2"}).status_code == 413


# -- a real server ----------------------------------------------------------------------------------------------------


def test_a_post_that_is_cut_off_prints_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(viewed(directory)) as viewer:
        token, here = viewer.url.partition("token=")[2], f"127.0.0.1:{viewer.port}"
        fields = {**POST, "Host": here, "Origin": f"http://{here}", "Authorization": f"Bearer {token}"}
        lines = ["POST /api/flags HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
        with socket.create_connection(("127.0.0.1", viewer.port)) as client:
            client.sendall("\r\n".join([*lines, "Content-Length: 10", "", "{}"]).encode())
        assert raw_request(viewer.port, "/api/traces", token)[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_a_page_that_waits_hears_of_new_steps(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(scripted([Result(0)] * 9), tmp_path)
    env.reset()
    env.step(0)
    answers = viewed(tmp_path)
    with served(answers) as viewer:
        token = viewer.url.partition("token=")[2]
        _, body = raw_request(viewer.port, "/api/changes?since=0", token)
        known = json.loads(body)
        env.step(0)
        env.flush()
        now = known
        for _ in range(3):  # an answer comes after 20 seconds without news, which a busy machine may need to look again
            if now["version"] == known["version"]:
                _, body = raw_request(viewer.port, f"/api/changes?since={known['version']}", token)
                now = json.loads(body)
        assert now["version"] > known["version"]
        assert now["traces"][0]["steps"] == 2
        assert now["traces"][0]["live"]
    env.close()


def test_a_server_stops_although_a_page_waits(directory: Path) -> None:
    answers = viewed(directory)
    with served(answers) as viewer, socket.create_connection(("127.0.0.1", viewer.port)) as waiting:
        token = viewer.url.partition("token=")[2]
        lines = ["GET /api/changes?since=999 HTTP/1.1", f"Host: 127.0.0.1:{viewer.port}"]
        waiting.sendall("\r\n".join([*lines, f"Authorization: Bearer {token}", "", ""]).encode())
        assert raw_request(viewer.port, "/api/traces", token)[0] == 200


def test_idle_connections_without_a_token_lock_nobody_out(directory: Path) -> None:
    with served(viewed(directory)) as viewer, contextlib.ExitStack() as opened:
        token = viewer.url.partition("token=")[2]
        for number in range(200):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", viewer.port)))
            if number % 2:
                client.sendall(b"GET / HTTP/1.1\r\nHost: ")  # a request that never ends
        assert raw_request(viewer.port, "/api/traces", token)[0] == 200


@pytest.mark.parametrize("sent", [b"GET /api/traces HTTP/1.1\r\nHost: x\r\n\r\n", b""])
def test_connections_of_a_crowd_do_not_displace_those_of_the_page(directory: Path, sent: bytes) -> None:
    with served(viewed(directory)) as viewer, contextlib.ExitStack() as opened:
        known = {"Authorization": f"Bearer {viewer.url.partition('token=')[2]}"}
        page, late = (http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=30) for _ in range(2))
        page.request("GET", "/api/traces", headers=known)
        page.getresponse().read()
        late.connect()  # its request comes when others have connected
        for _ in range(150):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", viewer.port)))
            client.sendall(sent)
        for connection in (page, late):
            connection.request("GET", "/api/traces", headers=known)
            assert connection.getresponse().status == 200
            connection.close()


def test_answers_that_are_not_read_lock_nobody_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
    monkeypatch.setattr(server, "_MOST_NEW", 3)
    with served(viewed(directory)) as viewer, contextlib.ExitStack() as opened:
        connections = viewer._server.server_state.connections
        names: list[Any] = []
        for _ in range(3):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            client.connect(("127.0.0.1", viewer.port))
            client.setblocking(False)
            names.append(client.getsockname())
            for _ in range(6000):
                if any(one.flow.write_paused for one in connections if one.client == names[-1]):
                    break
                with contextlib.suppress(OSError):
                    client.send(b"GET /api/traces HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
                time.sleep(0.01)
        assert raw_request(viewer.port, "/api/traces", viewer.url.partition("token=")[2])[0] == 200
        assert names[0] not in [one.client for one in connections]  # the oldest one made room


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01" + bytes(100),
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50000,
        random.Random(0).randbytes(5000),
        b"GET /" + b"a" * 300000 + b" HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_garbage_does_not_stop_a_server(directory: Path, sent: bytes) -> None:
    with served(viewed(directory)) as viewer:
        with socket.create_connection(("127.0.0.1", viewer.port)) as client:
            client.settimeout(10)
            try:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                assert b"cartpole" not in client.recv(1 << 16)
            except OSError:
                pass  # it may hang up at once
        assert raw_request(viewer.port, "/api/traces", viewer.url.partition("token=")[2])[0] == 200


def test_many_requests_leak_nothing(directory: Path) -> None:
    """Every kind of request, allowed and not, many times: memory, threads and files stay as they are."""
    count = 100_000 if LONG else 2000
    with served(viewed(directory)) as viewer:
        token = viewer.url.partition("token=")[2]
        paths = [
            "/?token=x",
            "/api/traces",
            "/api/episode?episode=1",
            "/api/plot?episode=1&column=observations",
            "/../etc/passwd",
        ]
        paths += [
            "/api/steps?episode=2",
            "/api/compare?a=0:1&b=0:2",
            "/api/episodes?where=(",
            "/api/nothing",
            "/nothing",
        ]
        connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=30)

        def ask(number: int) -> None:
            known = {"Authorization": f"Bearer {token if number % 3 else 'wrong'}"}
            connection.request("GET", f"{paths[number % len(paths)]}", headers=known)
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status in (200, 400, 403, 404), body
            assert answer.status == 403 or number % 3 or not number % len(paths)

        for number in range(count // 4):
            ask(number)
        before = usage()
        for number in range(count - count // 4):
            ask(number)
        after = usage()
        connection.close()
        assert after["files"] <= before["files"] + 2
        assert after["kB"] <= before["kB"] + 20_000


def usage() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"files": len(os.listdir("/proc/self/fd")), "kB": pages * 4}


def test_answers_are_sent_at_once(viewer: Viewer) -> None:
    """Nagle's algorithm would hold the body of each answer back for 40 ms."""
    assert viewer._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_an_error(directory: Path) -> None:
    with served(viewed(directory)) as viewer, pytest.raises(OSError, match="in use"):
        Viewer(viewed(directory), pages_of(FILES), port=viewer.port)


def test_other_machines_need_an_address_not_a_name(directory: Path) -> None:
    viewer = Viewer(viewed(directory), pages_of(FILES), host="0.0.0.0")
    token = viewer.url.partition("token=")[2]
    with TestClient(viewer.app, base_url=f"http://127.0.0.1:{viewer.port}") as client:
        for host, status in (("192.168.1.5", 200), ("[fe80::1]", 200), ("evil.example", 403)):
            headers = {"Host": f"{host}:{viewer.port}", "Authorization": f"Bearer {token}"}
            assert client.get("/api/traces", headers=headers).status_code == status
    viewer._socket.close()


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("10.1.1.1", False),
        ("127.evil.example", False),
        ("127.0.0.2", True),
    ],
)
def test_loopback_addresses_are_known(host: str, is_safe: bool) -> None:
    assert is_loopback(host) is is_safe


def test_a_server_on_another_address_of_this_machine_is_reached_by_it(directory: Path) -> None:
    with served(viewed(directory), host="127.0.0.2") as viewer:
        assert f"http://127.0.0.2:{viewer.port}/" in viewer.url
        headers = {"Authorization": f"Bearer {viewer.url.partition('token=')[2]}"}
        connection = http.client.HTTPConnection("127.0.0.2", viewer.port, timeout=30)
        connection.request("GET", "/api/traces", headers=headers)
        assert connection.getresponse().status == 200
        connection.close()


def test_a_trace_that_is_removed_is_an_error_not_a_crash(tmp_path: Path) -> None:
    directory = cartpoles(tmp_path / "t", 2)
    with served(viewed(directory)) as viewer:
        token = viewer.url.partition("token=")[2]
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        for path, allowed in (
            ("/api/episode?episode=1", (409, 422)),
            ("/api/plot?episode=0&column=observations", (409, 422)),
            ("/api/changes?since=0", (200,)),
            ("/api/traces", (200,)),
        ):
            status, body = raw_request(viewer.port, path, token)
            assert status in allowed, (path, body)
