"""Reward models on servers: a classifier's logits, and a judge that scores by a rubric."""

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from firm.alignment.rewards import score
from firm.base.servers import JsonServer
from firm.run.plugins import code_in
from reward_models import RewardModelConfig, load_reward_model
from tests.json_server import serving
from tests.smoke import ROOT

PATH = str(ROOT / "firm/miniature/checkpoints/helpful")
PROMPTS = ["\n\nHuman: Hi\n\nAssistant:", "\n\nHuman: How are you?\n\nAssistant:"]
REPLIES = [" Hello!", " Fine, thank you, and you?"]


def classifier():
    model = AutoModelForSequenceClassification.from_pretrained(PATH, dtype=torch.float32).eval()

    @torch.no_grad()
    def answer(path, content):
        assert path == "/classify"
        assert content["use_activation"] is False
        assert content["add_special_tokens"] is False
        rows = [model(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in content["input"]]
        data = [{"index": index, "probs": row} for index, row in enumerate(rows)]
        return 200, {"data": data[::-1]}  # in any order

    return answer


@pytest.mark.parametrize("format", ["plain", "hh_pair"])
def test_a_served_classifier_scores_as_one_that_is_loaded(format):
    settings = {"path": PATH, "format": format, "append_eos": True, "batch_size": 1}
    (local,) = score(
        {"x": load_reward_model(RewardModelConfig(**settings), "x")}, PROMPTS, REPLIES
    ).tolist()
    with serving(classifier()) as url:
        served = load_reward_model(RewardModelConfig(**settings, url=url), "x")
        (far,) = score({"x": served}, PROMPTS, REPLIES).tolist()
        golden = [{"prompt": PROMPTS[0], "completion": REPLIES[0], "score": local[0]}]
        load_reward_model(RewardModelConfig(**settings, url=url, golden=_golden(golden)), "x")
    assert far == pytest.approx(local, abs=1e-5)
    assert far[0] != far[1]
    assert all(p.device.type == "meta" for p in served.model.parameters())  # no weights here


def _golden(rows):
    from reward_models.config import GoldenScore

    return [GoldenScore(**row) for row in rows]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((503, "busy"), r"/classify does not answer .status 503"),
        ((429, "later"), r"/classify does not answer .status 429: later"),
        ((404, {"detail": "Not Found"}), "status 404"),
        ((200, {"data": [{"index": 0, "probs": [1.0, 2.0]}]}), r"\[2, 1\] finite logits, got"),
        ((200, {"data": [{"index": 0, "probs": [1.0]}]}), r"finite logits"),
        ((200, {"data": [{"index": i, "probs": [float("nan")]} for i in (0, 1)]}), "finite"),
        ((200, {"result": []}), "does not answer as vLLM does"),
    ],
)
def test_a_server_without_scores_is_an_error_that_names_it(answer, message, monkeypatch):
    monkeypatch.setattr("firm.base.servers.time.sleep", lambda seconds: None)
    calls = []

    def answered(path, content):
        calls.append(path)
        return answer

    with serving(answered) as url:
        reward = load_reward_model(RewardModelConfig(path=PATH, format="plain", url=url), "x")
        with pytest.raises(Exception, match=message) as error:
            score({"x": reward}, PROMPTS, REPLIES)
    assert url in str(error.value)
    assert len(calls) == (3 if answer[0] in (503, 429) else 1)  # a refusal is not tried again


def test_a_busy_server_is_given_the_time_that_it_asks_for(monkeypatch):
    pauses, answers = [], [(429, "later", {"Retry-After": "7"}), (503, "busy"), (200, {"found": 1})]
    monkeypatch.setattr("firm.base.servers.time.sleep", pauses.append)
    with serving(lambda path, content: answers.pop(0)) as url:
        assert JsonServer(url).post("/classify", {}) == {"found": 1}
        assert pauses == [0, 7, 0.5]
        answers += [(429, "later", {"Retry-After": "70"}), (200, {})]
        JsonServer(url, timeout_s=60).post("/classify", {})
        assert pauses[3:] == [0, 60]


def judge(url, tmp_path, **options):
    settings = {"url": url, "model": "m", "rubric": "short", "cache": str(tmp_path / "answers")}
    return load_reward_model(RewardModelConfig(name="llm_judge", options=settings | options), "x")


def test_a_judge_scores_each_reply_once_and_tells_its_cost(tmp_path):
    asked = []

    def answer(path, content):
        assert path == "/v1/chat/completions"
        asked.append(content)
        reply = content["messages"][1]["content"].partition("<reply>\n")[2]
        points = 10 if "Hello" in reply else 2.5
        message = {"content": json.dumps({"score": points})}
        return 200, {"choices": [{"message": message}], "usage": {"total_tokens": 20}}

    with serving(answer) as url:
        costs = {}
        reward = judge(url, tmp_path)
        (row,) = score({"x": reward}, [*PROMPTS, PROMPTS[0]], [*REPLIES, REPLIES[0]]).tolist()
        assert row == [10, 2.5, 10]
        assert len(asked) == 2
        system = asked[0]["messages"][0]["content"]
        assert "The criterion is: short" in system
        assert "from 0 to 10" in system
        schema = asked[0]["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 10}
        again = judge(url, tmp_path)  # as of another run
        assert score({"x": again}, PROMPTS, REPLIES).tolist() == [[10, 2.5]]
        assert len(asked) == 2
        again.function._scores(PROMPTS, REPLIES, costs.__setitem__)
        assert costs == {"judge_calls": 0, "judge_tokens": 0}
        again.function._scores([PROMPTS[0]], ["Hello again!"], costs.__setitem__)
        assert costs == {"judge_calls": 1, "judge_tokens": 20}
        other = judge(url, tmp_path, rubric="long")  # another question has no cached answer
        score({"x": other}, PROMPTS, REPLIES)
        chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Sure?"}]
        score({"x": reward}, [chat], ["Yes."])
    assert len(asked) == 6
    assert "system: Be terse.\n\nuser: Sure?" in asked[-1]["messages"][1]["content"]


@pytest.mark.parametrize("said", ["ten", '{"score": 11}', '{"score": NaN}', '{"points": 3}', None])
def test_an_answer_that_is_no_score_is_asked_for_again_and_then_an_error(said, tmp_path):
    asked = []

    def answer(path, content):
        asked.append(content["seed"])
        text = '{"score": 3}' if len(asked) == 2 and not tmp_path.joinpath("bad").exists() else said
        return 200, {"choices": [{"message": {"content": text}}]}

    with serving(answer) as url:
        assert score({"x": judge(url, tmp_path)}, PROMPTS[:1], REPLIES[:1]).tolist() == [[3]]
        assert asked == [0, 1]
        tmp_path.joinpath("bad").touch()
        with pytest.raises(Exception, match="must answer with a JSON object with a score from 0"):
            score({"x": judge(url, tmp_path)}, PROMPTS[1:], REPLIES[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "node7"}, "url must be an address such as http://node7:8000, got 'node7'"),
        ({"low": 3, "high": 3}, "low must be less than high"),
        ({"rubric": " "}, "rubric must say what makes a reply good"),
        ({"num_requests": 0}, "num_requests at least 1"),
    ],
)
def test_a_judge_with_settings_that_cannot_work_is_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        judge(**{"url": "http://127.0.0.1:9", "tmp_path": tmp_path} | options)


def test_servers_that_a_folder_names_need_permission():
    settings = {
        "rewards": {"a": {"options": {"url": "http://a"}}, "b": {"url": "http://b"}},
        "rollout.engine": {"urls": ["http://c"]},
    }
    assert code_in(settings) == ["http://a", "http://b", "http://c"]
