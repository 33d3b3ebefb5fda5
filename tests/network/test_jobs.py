"""What a job may contain: the legitimate one alone, whatever FLARE would accept beside it."""

import ast
import copy
import inspect
import io
import json
import math
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

import nvflare
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.app_common.job_launcher import process_launcher
from nvflare.app_common.job_launcher.process_launcher import ProcessJobLauncher
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.common.excepts import ComponentNotAuthorized
from nvflare.fuel.f3.cellnet.core_cell import CoreCell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.stats_pool import StatsPoolManager
from nvflare.fuel.utils.config_service import ConfigService
from nvflare.private.defs import SysCommandTopic
from nvflare.private.fed.app.fl_conf import FLClientStarterConfiger, FLServerStarterConfiger
from nvflare.private.fed.client.client_json_config import ClientJsonConfigurator
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.server_json_config import ServerJsonConfigurator
from nvflare.private.fed.utils.app_authz import AppAuthzService
from nvflare.private.fed.utils.app_deployer import AppDeployer
from nvflare.private.fed.utils.fed_utils import authorize_build_component
from nvflare.private.privacy_manager import PrivacyManager, PrivacyService

from firm.network import gate, jobs, kits

CONTROLLER = "tests.network.test_hostile_jobs.Program"
SITE, SERVER = "config/config_fed_client.json", "config/config_fed_server.json"
STOCK = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
JOB = "6641d8a2-93b3-40c6-873a-afb41f14fb7a"
META = {
    "name": "run",
    "resource_spec": {},
    "min_clients": 1,
    "mandatory_clients": ["bank"],
    "deploy_map": {"server": ["server"], "site": ["bank"]},
    "study": "default",
    "submitter_name": "admin@firm.org",
    "submitter_org": "firm",
    "submitter_role": "project_admin",
    "job_id": JOB,
    "status": "SUBMITTED",
}


def _site(**arguments):
    """A legitimate site's folder, with other arguments of the executor."""
    app = copy.deepcopy(dict(jobs.site_app(1.0, 8.0)))
    app[SITE]["executors"][0]["executor"]["args"] |= arguments
    return app


def _server(**arguments):
    """A legitimate server's folder, with other arguments of the workflow."""
    app = copy.deepcopy(dict(jobs.server_app(CONTROLLER, {"name": "run"})))
    app[SERVER]["workflows"][0]["args"] |= arguments
    return app


# --- The table ------------------------------------------------------------------------------------


def _write(folder, app):
    for name, content in app.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


SITE_ALLOWED = jobs.site_app()
SERVER_ALLOWED = jobs.server_app(CONTROLLER, {"name": jobs.NAME})


def test_the_jobs_of_this_project_are_accepted(tmp_path):
    for number, (app, allowed) in enumerate(
        [(_site(), SITE_ALLOWED), (_server(), SERVER_ALLOWED)],
    ):
        folder = _write(tmp_path / str(number), app)
        for place in (folder, folder / "config"):
            (place / ".__nvfl_sig.json").write_text("{}")
            (place / ".__nvfl_submitter.crt").write_text("")
        assert jobs.problem_of_app(folder, allowed) is None
    assert jobs.problem_of_meta(META) is None


HOSTILE = {
    bool: [True, False],
    float: [0.0, -1.0, math.nan, math.inf, 1e9],
    str: ["bash -c 'touch /tmp/x'", "/tmp/x.py", "in_process", "external_process", "", "attach"],
    list: [["bash", "-c", "touch /tmp/x"], {"path": STOCK, "args": {}}],
}
ARGUMENTS = list(inspect.signature(ClientAPIExecutor.__init__).parameters)[1:]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_no_argument_of_flares_executor_reaches_a_site(tmp_path, argument):
    for value in (value for values in HOSTILE.values() for value in values):
        folder = _write(tmp_path, _site(**{argument: value}))
        assert jobs.problem_of_app(folder, SITE_ALLOWED), (argument, value)
        stock = {"path": STOCK, "args": {argument: value}}
        assert jobs.problem_of_component(stock, SITE_ALLOWED), (argument, value)
        own = {"path": jobs.EXECUTOR, "args": {argument: value}}
        assert jobs.problem_of_component(own, SITE_ALLOWED), (argument, value)


def _classes_of_flare():
    """Import paths of all classes that FLARE ships, those that cannot be imported here too."""
    root = Path(nvflare.__file__).parent
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}"


def test_no_class_of_flare_is_built_at_a_site_or_a_server():
    classes = set(_classes_of_flare())
    assert STOCK in classes
    assert len(classes) > 1000
    for path in classes:
        for arguments in ({}, {"heartbeat_interval": 1.0, "heartbeat_timeout": 8.0}):
            entry = {"id": "firm", "path": path, "args": arguments}
            assert jobs.problem_of_component(entry, SITE_ALLOWED), path
            assert jobs.problem_of_component(entry, SERVER_ALLOWED), path


@pytest.mark.parametrize("kind", ["components", "task_data_filters", "task_result_filters"])
def test_a_job_brings_no_component_and_no_filter(tmp_path, kind):
    for app, allowed, name in ((_site(), SITE_ALLOWED, SITE), (_server(), SERVER_ALLOWED, SERVER)):
        own = jobs.EXECUTOR if name == SITE else CONTROLLER
        for path in (STOCK, own, "nvflare.app_common.filters.exclude_vars.ExcludeVars"):
            config = {**app[name], kind: [{"id": "x", "path": path, "args": {}}]}
            problem = jobs.problem_of_app(_write(tmp_path / name[-11:], {name: config}), allowed)
            assert f"{kind} must have 0 entries" in str(problem)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (["format_version"], 3, "config_fed_client.json.format_version must be 2, got 3"),
        (["format_version"], 2.0, "format_version must be 2, got 2.0"),
        (["executors", 0, "tasks"], ["*"], "executors[0].tasks[0] must be 'firm', got '*'"),
        (["executors", 0, "executor", "path"], STOCK, "executor.path must be 'firm.network.exec"),
        (["executors", 0, "executor", "class_path"], STOCK, "executor.class_path is not allowed"),
        (["executors", 0, "executor", "name"], "ClientAPIExecutor", "executor.name is not allowed"),
        (["executors", 0, "executor", "config_type"], "dict", "config_type is not allowed"),
        (["executors"], [], "executors must have 1 entries, got []"),
        (["components"], {}, "components must have 0 entries, got {}"),
        (["task_result_filters"], [{"tasks": ["*"]}], "task_result_filters must have 0 entries"),
        (["@x"], "y", "config_fed_client.json.@x is not allowed"),
        (["handlers"], [], "config_fed_client.json.handlers is not allowed"),
        (["default_task_fetch_interval"], 1, "default_task_fetch_interval is not allowed"),
        (["x\n2026-01-01 round 9/9\x1b[2J"], 1, r"x\n2026-01-01 round 9/9\x1b[2J is not allowed"),
    ],
)
def test_what_is_refused_is_named_in_one_line(tmp_path, path, value, told):
    app = _site()
    place = app[SITE]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    problem = jobs.problem_of_app(_write(tmp_path, app), SITE_ALLOWED)
    assert problem is not None
    assert problem.startswith("the job is refused: ")
    assert told in problem
    assert problem.isprintable()


@pytest.mark.parametrize(
    "name",
    [
        "config/config_fed_client.conf",
        "config/config_fed_client.yml",
        "config/config_fed_client.json.default",
        "config/x/config_fed_client.json",
        "config/comm_config.json",
        "config/log_config.json",
        "config_fed_client.json",
        "custom/train.py",
        "custom/nvflare_decomposers/x.py",
        "train.py",
        "config/.__nvfl_sig.json/x",
    ],
)
def test_a_site_takes_no_other_file(tmp_path, name):
    folder = _write(tmp_path, {**_site(), name: "{}"})
    problem = jobs.problem_of_app(folder, SITE_ALLOWED)
    assert problem is not None
    first = min(path for path in (name, *map(str, Path(name).parents)) if path not in ".config")
    assert f"the file {first} is not allowed" in problem


def test_links_missing_files_and_files_that_cannot_be_read_are_refused(tmp_path):
    folder = _write(tmp_path / "a", _site())
    (folder / SITE).rename(tmp_path / "elsewhere.json")
    assert f"the file {SITE} is missing" in str(jobs.problem_of_app(folder, SITE_ALLOWED))
    (folder / SITE).symlink_to(tmp_path / "elsewhere.json")
    assert f"the file {SITE} is not allowed" in str(jobs.problem_of_app(folder, SITE_ALLOWED))
    (folder / SITE).unlink()
    config = json.dumps(_site()[SITE])
    twice = '{"format_version": 2, "executors": [], ' + config[1:]
    for text in ("{", "[" * 50_000, twice, config + " " * 70_000, "\ufeff{}"):
        (folder / SITE).write_text(text)
        problem = str(jobs.problem_of_app(folder, SITE_ALLOWED))
        assert f"the file {SITE} cannot be read" in problem, text[:50]


@pytest.mark.parametrize(
    "name", ["../../../traversal_run", "/tmp/run", "", ".", "a/b", "a\n", "x" * 65, None, ["a"], 3]
)
def test_a_servers_folder_names_a_run_that_is_no_path(tmp_path, name):
    problem = jobs.problem_of_app(_write(tmp_path, _server(name=name)), SERVER_ALLOWED)
    assert problem is not None
    assert "workflows[0].args.name must be a name" in problem


def test_a_server_runs_no_other_workflow_and_with_no_other_argument(tmp_path):
    for change in (
        {"path": "nvflare.app_common.workflows.fedavg.FedAvg"},
        {"path": "firm.jobs.network.FlareChannel"},
        {"args": {"name": "run", "out": "/tmp"}},
        {"args": {}},
    ):
        app = _server()
        app[SERVER]["workflows"][0] |= change
        assert jobs.problem_of_app(_write(tmp_path, app), SERVER_ALLOWED), change


@pytest.mark.parametrize(
    "more",
    [
        {"byoc": True},
        {"launcher_spec": {"bank": {"docker": {"image": "x"}}}},
        {"resource_spec": {"bank": {"docker": {"image": "x"}}}},
        {"stats_pool_config": {}},
        {"custom_props": {}},
        {"scope": "public"},
        {"edge_method": "x"},
        {"study": "other"},
        {"flower_predeployed": True},
        {"name": "../x"},
        {"min_clients": -1},
        {"mandatory_clients": "bank"},
        {"mandatory_clients": ["../x"]},
        {"deploy_map": {"server": ["server", "bank"]}},
        {"deploy_map": {"server": ["server"], "site": ["bank"], "other": ["branch"]}},
        {"deploy_map": {"server": ["server"], "site": [{"sites": ["bank"]}]}},
    ],
)
def test_metadata_say_nothing_else(more):
    assert str(jobs.problem_of_meta(META | more)).startswith(
        f"the job is refused: meta.{next(iter(more))}"
    )


# --- The same through FLARE's own code ------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The kits of a small federation, ready to start."""
    folder = tmp_path_factory.mktemp("federation")
    made = kits.provision(folder, name="small", host="localhost", port=8123, sites=["bank"])
    kits.prepare_server(made["server"], controller=CONTROLLER, arguments={"name": jobs.NAME})
    kits.prepare_site(made["bank"], site="bank")
    return made


@pytest.fixture
def start(made, monkeypatch):
    """Lets FLARE build what a kit says: ``start(party)`` returns workspace and configuration."""
    monkeypatch.setattr(AppAuthzService, "app_validator", None)
    monkeypatch.setattr(PrivacyService, "manager", PrivacyManager(None, None, None))
    processors = list(ClientRequestProcessors.request_processors)

    def build(party):
        starter = FLServerStarterConfiger if party == "server" else FLClientStarterConfiger
        args = _arguments(made[party])
        workspace = Workspace(str(made[party]), party)
        conf = starter(workspace=workspace, args=args, kv_list=args.set)
        conf.configure()
        AppAuthzService.initialize(conf.app_validator)
        return workspace, conf

    yield build
    ClientRequestProcessors.request_processors[:] = processors
    ConfigService.reset()


def _arguments(kit):
    return Namespace(
        workspace=str(kit),
        job_id=None,
        set=["secure_train=true", "uid=bank", "org=firm", "config_folder=config"],
        client_name="bank",
        sp_scheme="grpc",
        sp_target="localhost:8123",
        parent_url="",
    )


def _deploy(workspace, app, meta=META):
    """Lets FLARE deploy a folder, and returns what it says and whether the folder is there."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as packed:
        for name, config in app.items():
            packed.writestr(name, config if isinstance(config, str) else json.dumps(config))
    error = AppDeployer().deploy(
        workspace=workspace,
        job_id=JOB,
        job_meta=dict(meta),
        app_name="site",
        app_data=content.getvalue(),
        fl_ctx=FLContext(),
    )
    return error, Path(workspace.get_app_dir(JOB)).exists()


def _hostile_apps():
    """Folders for a site that FLARE itself takes, each with one thing too many."""
    yield "a command", _site(execution_mode="external_process", command="touch /tmp/x")
    yield "a script", _site(execution_mode="in_process", task_script_path="/tmp/x.py")
    app = _site()
    app[SITE]["executors"][0]["executor"] = {
        "path": STOCK,
        "args": {"execution_mode": "external_process", "command": "touch /tmp/x"},
    }
    yield "FLARE's executor", app
    app = _site()
    app[SITE]["components"] = [{"id": "x", "path": "nvflare.widgets.widget.Widget", "args": {}}]
    yield "a component", app
    yield "code", {**_site(), "custom/x.py": "print()"}
    yield "a second configuration", {**_site(), "config/config_fed_client.conf": "{}"}


@pytest.mark.parametrize("app", [pytest.param(app, id=name) for name, app in _hostile_apps()])
def test_a_site_of_flare_takes_the_job_of_this_project_and_no_hostile_one(start, app, caplog):
    workspace, _ = start("bank")
    assert _deploy(workspace, _site()) == (None, True)
    error, is_there = _deploy(workspace, app)
    assert error.startswith("the job is refused: ")
    assert not is_there
    (record,) = caplog.records
    assert record.name == "firm.network.gate"
    assert record.getMessage() == error


def test_a_server_of_flare_takes_the_job_of_this_project_and_no_hostile_one(start):
    workspace, _ = start("server")
    assert _deploy(workspace, _server()) == (None, True)
    for app in (_server(name="../../x"), _server(out="/tmp"), {**_server(), "custom/x.py": ""}):
        error, is_there = _deploy(workspace, app)
        assert error.startswith("the job is refused: ")
        assert not is_there


def _configure(party, workspace, conf, kit):
    """Lets FLARE build a deployed job in its own process; the folder's own check is passed."""
    folder = workspace.get_app_dir(JOB)
    args = _arguments(kit)
    args.job_id = JOB
    name = Path(folder) / (SITE if party == "bank" else SERVER)
    if party == "bank":
        job = ClientJsonConfigurator(workspace, str(name), args, folder, kv_list=args.set)
    else:
        job = ServerJsonConfigurator(workspace, str(name), args, folder, kv_list=args.set)
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
    context.set_prop(FLContextKey.CURRENT_JOB_ID, JOB)
    context.set_prop(FLContextKey.JOB_META, META)
    job.set_component_build_authorizer(
        authorize_build_component, fl_ctx=context, event_handlers=conf.handlers
    )
    job.configure()
    return job


def test_the_process_of_a_job_builds_what_this_project_needs(start, made):
    workspace, conf = start("bank")
    _write(Path(workspace.get_app_dir(JOB)), _site())
    (executor,) = _configure("bank", workspace, conf, made["bank"]).executors
    assert isinstance(executor.executor, ClientAPIExecutor)
    assert executor.executor.execution_mode == "attach"


@pytest.mark.parametrize("argument", [*ARGUMENTS, "class_attributes"])
def test_the_process_of_a_job_refuses_arguments_even_if_the_folder_was_not_looked_at(
    start, made, argument
):
    workspace, conf = start("bank")
    hostile = {"execution_mode": "attach", "attach_id": "x", argument: "touch"}
    _write(Path(workspace.get_app_dir(JOB)), _site(**hostile))
    with pytest.raises(ComponentNotAuthorized, match=r"the job is refused: component\.args"):
        _configure("bank", workspace, conf, made["bank"])


def test_the_process_of_a_job_refuses_what_a_kits_list_of_classes_lets_pass(
    start, made, monkeypatch
):
    everything = (["*"], "enforce", "x")
    monkeypatch.setattr(ComponentPathAuthorizer, "_get_policy", lambda *_, **__: everything)
    for party, app, name in (("bank", _site(), SITE), ("server", _server(), SERVER)):
        workspace, conf = start(party)
        widget = {"id": "x", "path": "nvflare.widgets.widget.Widget", "args": {}}
        app[name]["components"] = [widget]
        _write(Path(workspace.get_app_dir(JOB)), app)
        with pytest.raises(ComponentNotAuthorized, match=r"nvflare.widgets.widget.Widget is not"):
            _configure(party, workspace, conf, made[party])


@pytest.mark.parametrize("party", ["bank", "server"])
def test_no_process_is_started_for_other_metadata_or_another_folder(
    start, made, monkeypatch, party
):
    workspace, conf = start(party)
    started = []
    monkeypatch.setattr(ProcessJobLauncher, "launch_job", lambda *_: started.append(_) or "handle")
    launcher = conf.components["process_launcher"]
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace)
    app = _site() if party == "bank" else _server()
    assert _deploy(workspace, app) == (None, True)
    assert launcher.launch_job(dict(META), context) == "handle"
    with pytest.raises(RuntimeError, match=r"refused: meta\.stats_pool_config is not"):
        launcher.launch_job({**META, "stats_pool_config": {}}, context)
    _write(Path(workspace.get_app_dir(JOB)), {"custom/x.py": ""})
    with pytest.raises(RuntimeError, match="refused: the file custom is not allowed"):
        launcher.launch_job(dict(META), context)
    assert len(started) == 1


@pytest.mark.parametrize("folder", ["my kits", "a # b", "it's", 'say "kit"', "back\\slash", "λ"])
def test_any_folder_reaches_the_process_of_a_job_whole(folder, tmp_path, monkeypatch):
    python = tmp_path / folder / "python"
    monkeypatch.setattr("sys.executable", str(python))
    started = []

    def spawned(argv, env):
        started.append(argv)
        return SimpleNamespace()

    monkeypatch.setattr(process_launcher, "spawn_process", spawned)
    monkeypatch.setattr(gate._Gate, "launch_job", ProcessJobLauncher.launch_job)
    values = {
        JobProcessArgs.EXE_MODULE: ("-m", "nvflare.worker"),
        JobProcessArgs.WORKSPACE: ("-w", str(tmp_path / folder)),
        JobProcessArgs.APP_ROOT: ("-r", str(tmp_path / folder / "app")),
        JobProcessArgs.STARTUP_DIR: ("-u", str(tmp_path / folder / "startup")),
        JobProcessArgs.JOB_ID: ("-n", JOB),
        JobProcessArgs.OPTIONS: ("--set", " secure_train=true org=firm"),
    }
    context = FLContext()
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, values, private=True, sticky=False)
    context.set_prop(
        FLContextKey.WORKSPACE_OBJECT, SimpleNamespace(get_app_custom_dir=lambda _: "")
    )
    for launcher in (gate.SiteGate(), gate.ServerGate("a.b", [("name", "run")])):
        launcher.launch_job({"job_id": JOB}, context)
    parts = (JobProcessArgs.STARTUP_DIR, JobProcessArgs.APP_ROOT)
    for argv, other in zip(started, parts, strict=True):
        assert argv[0] == str(python)
        for name in (JobProcessArgs.WORKSPACE, other, JobProcessArgs.JOB_ID):
            flag, value = values[name]
            assert argv[argv.index(flag, 2) + 1] == value
        assert argv[-3:] == ["--set", "secure_train=true", "org=firm"]


@pytest.fixture
def cell():
    """A cell of FLARE's as a site's process has it, that answers everything."""
    StatsPoolManager.pools.clear()
    cell = CoreCell("bank", "tcp://localhost:0", secure=False, credentials={})
    cell.register_request_cb("*", "*", lambda message: make_reply(ReturnCode.OK))
    yield SimpleNamespace(core_cell=cell)
    CoreCell.ALL_CELLS.pop("bank")


def _answer(cell, origin):
    message = CellMessage({MessageHeaderKey.ORIGIN: origin, MessageHeaderKey.CHANNEL: "c"})
    message.set_header(MessageHeaderKey.TOPIC, "t")
    reply = cell.core_cell._process_request(origin, message)
    return reply.get_header(MessageHeaderKey.RETURN_CODE)


def _site_context(cell):
    context = FLContext()
    context.set_prop(ReservedKey.IDENTITY_NAME, "bank", private=False)
    context.set_prop(FLContextKey.SITE_OBJ, SimpleNamespace(cell=cell))
    context.set_prop(ReservedKey.ENGINE, SimpleNamespace(get_cell=lambda: cell))
    return context


def test_a_site_answers_what_a_run_needs_and_reads_no_files_for_its_server(start, cell):
    _, conf = start("bank")
    context = _site_context(cell)
    conf.components["process_launcher"].handle_event(EventType.SYSTEM_BOOTSTRAP, context)
    answered = {topic for each in conf.base_deployer.req_processors for topic in each.get_topics()}
    assert answered == gate.REQUESTS
    assert not answered & set(vars(SysCommandTopic).values())


@pytest.mark.parametrize("event", [EventType.SYSTEM_BOOTSTRAP, EventType.ABOUT_TO_START_RUN])
def test_a_site_hears_its_server_and_no_other_site(start, cell, event):
    _, conf = start("bank")
    assert _answer(cell, "university") == ReturnCode.OK
    conf.components["process_launcher"].handle_event(event, _site_context(cell))
    for origin in ("server", f"server.{JOB}", "bank", f"bank.{JOB}"):
        assert _answer(cell, origin) == ReturnCode.OK
    for origin in ("university", f"university.{JOB}", "bank2", "", None, "admin\x1b[2J"):
        assert _answer(cell, origin) == ReturnCode.UNAUTHENTICATED


def test_flare_does_not_start_when_its_server_cannot_be_restricted(start):
    _, conf = start("server")
    with pytest.raises(UnsafeComponentError, match="this FLARE cannot be restricted"):
        conf.components["process_launcher"].handle_event(EventType.SYSTEM_BOOTSTRAP, FLContext())
