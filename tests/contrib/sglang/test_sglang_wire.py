"""What the SGLang engine says and understands on the wire, beyond the contract: tests/contrib/sglang/sglang_stand_in answers."""

import asyncio
import contextlib
import json
import re

import pytest
import torch

from agentrl.config.load import config_from
from agentrl.config.schema import SglangConfig
from agentrl.contrib.sglang.engine import SglangEngine
from agentrl.contrib.sglang.servers import Facts, TurnRequests, Versions, check_names
from agentrl.engines.weights.parameters import expected_parameters
from agentrl.rollout.engine import Sampling
from agentrl.run.engine_choice import EngineChoice
from agentrl.utils.errors import ConfigError, EngineError
from tests.contrib.sglang.sglang_stand_in.requests import FROZEN, INSTALLED, BadRequestError, Frozen, frozen, text_of
from tests.contrib.sglang.sglang_stand_in.server import DEFAULTS, Settings, StandIn
from tests.engines.contract import off, prompt_of, sampled, until
from tests.engines.engine_models import VOCAB, build_model, changed, load
from tests.publishing import publish

pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def client(model, *servers, folder=None, **config):
    """A started engine over these servers."""
    cfg = SglangConfig(servers=[server.address for server in servers], **config)
    engine = SglangEngine(model, cfg, folder=folder)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def test_parts_with_all_tokens_or_only_new_ones_are_the_same_turn(model_folder):
    """Servers with and without --incremental-streaming-output; the parts are 16 and 256 tokens apart."""
    turns = []
    for incremental in (True, False):
        with StandIn(model_folder, Settings({"incremental_streaming_output": incremental})) as server:
            async with client(model_folder, server) as engine:
                turns.append(await engine.generate(prompt_of(9), Sampling(max_tokens=300, seed=1), "a"))
            [body] = [body for body in server.posts("/generate") if body.get("stream")]
            assert body["sampling_params"]["stream_interval"] == (16 if incremental else 256)
    assert turns[0].token_ids == turns[1].token_ids and len(turns[0].token_ids) == 300
    assert turns[0].logprobs == turns[1].logprobs


async def test_a_request_that_is_aborted_in_the_queue_has_no_token_twice(model_folder):
    """SGLang's last part then has all tokens, also of a server whose other parts have the new ones only."""
    with StandIn(model_folder) as server:
        async with client(model_folder, server) as engine:
            whole = await engine.generate(prompt_of(9), Sampling(max_tokens=200, seed=1), "whole")
            task = asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=1500, seed=1), "long"))
            await sampled(engine, 40)
            await engine.pause()
            await engine.abort("long")
            partial = await asyncio.wait_for(task, 30)
            await engine.resume()
    count = min(len(partial.token_ids), 200)
    assert count >= 40 and partial.token_ids[:count] == whole.token_ids[:count]
    assert len(partial.token_ids) == len(partial.logprobs) == len(partial.versions)


async def test_the_models_own_end_token_ends_a_turn_only_if_it_is_a_stop_token(model_folder, tmp_path):
    """SGLang always stops there; the turn goes on in another request, with the same noise."""
    prompt, sampling = prompt_of(9), Sampling(max_tokens=40, seed=2)
    with StandIn(model_folder) as server:
        async with client(model_folder, server) as engine:
            free = await engine.generate(prompt, sampling, "a")
    end = free.token_ids[7]
    other = next(token for token in range(VOCAB) if token not in free.token_ids)
    ends = free.token_ids.count(end)
    folder = build_model(tmp_path / "ends", eos_token_id=end)
    with StandIn(folder) as server:
        async with client(folder, server) as engine:
            stopped = await engine.generate(prompt, Sampling(max_tokens=40, seed=2, stop_token_ids=(end,)), "b")
            went_on = await engine.generate(prompt, Sampling(max_tokens=40, seed=2, stop_token_ids=(other,)), "c")
            stats = await engine.stats()
        sent = [body for body in server.posts("/generate") if body.get("stream")]
    first = free.token_ids.index(end)
    assert stopped.finish == "stop" and stopped.token_ids == free.token_ids[: first + 1]
    assert went_on.finish == "length" and went_on.token_ids == free.token_ids
    assert torch.allclose(torch.tensor(went_on.logprobs), torch.tensor(free.logprobs), atol=1e-5)
    assert len(went_on.versions) == 40
    of_c = sent[1:]
    assert len(of_c) == ends + (free.token_ids[-1] != end) and of_c[1]["input_ids"] == [*prompt, *free.token_ids[: first + 1]]
    assert stats.prompt_tokens == 2 * len(prompt)


async def test_requests_without_a_seed_do_not_all_draw_the_same(model_folder):
    """A server with --enable-deterministic-inference gives each of them seed 42."""
    with StandIn(model_folder) as server:
        async with client(model_folder, server) as engine:
            turns = await asyncio.gather(*(engine.generate(prompt_of(9), Sampling(max_tokens=8), f"{n}") for n in range(3)))
            with pytest.raises(EngineError, match="set one of"):
                await engine.generate(prompt_of(9), Sampling(max_tokens=8, top_k=3, top_p=0.6), "both")
        assert len({tuple(turn.token_ids) for turn in turns}) == 3
        ids = [body["rid"] for body in server.posts("/generate") if body.get("stream")]
        assert len({len(rid) for rid in ids}) == 1  # an abort is of all ids that begin with its own


async def test_an_abort_while_the_server_is_paused_ends_a_request_that_its_scheduler_does_not_have(model_folder):
    with StandIn(model_folder) as server:
        async with client(model_folder, server) as engine:
            await engine.pause()
            task = asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=20, seed=1), "held"))
            for _ in range(100):
                await asyncio.sleep(0.01)
                if [body for body in server.posts("/generate") if body.get("stream")]:
                    break
            await engine.abort("held")
            held = await asyncio.wait_for(task, 10)
            await engine.resume()
            assert held.finish == "abort" and held.token_ids == []
            await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "next")
        assert server.running == 0


async def test_a_turn_moves_when_its_server_dies_and_a_server_that_is_back_gets_the_weights(model_folder, model, caplog):
    prompt, sampling = prompt_of(9), Sampling(max_tokens=600, seed=4)
    with StandIn(model_folder) as one, StandIn(model_folder) as two:
        port = int(one.address.rsplit(":", 1)[1])
        async with client(model_folder, one, two) as engine:
            whole = await engine.generate(prompt, sampling, "first")
            assert engine._servers.home["first"].address == one.address
            task = asyncio.ensure_future(engine.generate(prompt, sampling, "first"))
            await until(engine, lambda stats: stats.sampled_tokens >= 650)
            await asyncio.get_running_loop().run_in_executor(None, one.kill)
            moved = await asyncio.wait_for(task, 60)
            assert moved.token_ids == whole.token_ids and engine._servers.home["first"].address == two.address
            assert (await engine.stats()).extra == {"servers": 1}
            assert one.address in caplog.text and "requests move on" in caplog.text
            with StandIn(model_folder, port=port) as back:
                new = changed(model, seed=1)
                await publish(engine, 3, new)
                assert (await engine.stats()).extra == {"servers": 2}
                asked = (engine.generate(prompt, Sampling(max_tokens=9, seed=n), f"n{n}") for n in range(4))
                turns = await asyncio.gather(*asked)
                assert back.posts("/generate")
                assert {server.address for server in engine._servers.home.values()} == {two.address, back.address}
                plain = load(model_folder)
                assert all(off(plain, prompt, turn, weights=new) < 1e-5 and set(turn.versions) == {3} for turn in turns)
                for server in (back, two):
                    await asyncio.get_running_loop().run_in_executor(None, server.kill)
                with pytest.raises(EngineError, match="no SGLang server is alive") as dead:
                    await engine.generate(prompt, sampling, "last")
                assert two.address in str(dead.value) and back.address in str(dead.value)


async def test_files_of_weights_go_when_the_next_ones_are_loaded(model_folder, model, tmp_path):
    with StandIn(model_folder) as server:
        async with client(model_folder, server, folder=str(tmp_path)) as engine:
            for version in (1, 2):
                await publish(engine, version, changed(model, seed=version))
                [folder] = tmp_path.iterdir()
                assert server.model_path == str(folder)
            bodies = server.posts("/update_weights_from_disk")
        assert len(bodies) == 3 and list(tmp_path.iterdir()) == []
        assert {body["load_format"] for body in bodies} == {"auto"} and all(body["flush_cache"] for body in bodies)
        order = [route for route, _ in server.bodies if not route.startswith("/generate")]
        assert order == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"] * 3


async def test_weights_of_another_trainer_are_noticed(model_folder):
    with StandIn(model_folder) as server:
        async with client(model_folder, server) as ours, client(model_folder, server):
            with pytest.raises(EngineError, match=r"sampled with weights 'agentrl-.*', which are not this run's"):
                await ours.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")


UNFIT = [
    (Settings(original=True), r"logprobs of another temperature .* 1\.00 times .* SGLANG_RETURN_ORIGINAL_LOGPROB"),
    (Settings(without=("/pause_generation",)), "/pause_generation: 404: the server has no such route"),
    (Settings(silent=("/update_weights_from_disk",)), r"/update_weights_from_disk: no answer within 0\.3 s"),
    (Settings(api_key="secret"), "/model_info: 401: the server wants another API key; set sglang.api_key_env"),
    (Settings({"enable_deterministic_inference": False}), "ignores seeds, so no run could be repeated"),
    (Settings({"speculative_algorithm": "EAGLE"}), "--speculative-algorithm"),
    (Settings({"allow_auto_truncate": True}), "--allow-auto-truncate"),
    (Settings({"disaggregation_mode": "decode"}), "--disaggregation-mode decode"),
    (Settings({"skip_tokenizer_init": True}), "--skip-tokenizer-init"),
]


@pytest.mark.parametrize(("settings", "message"), UNFIT, ids=[message[:24] for _, message in UNFIT])
async def test_a_server_that_cannot_be_used_is_named_at_the_start(model_folder, settings, message, monkeypatch):
    monkeypatch.setattr("agentrl.contrib.sglang.engine.LOADING", 0.3 / 120)
    with StandIn(model_folder, settings) as server:
        with pytest.raises(EngineError, match=message) as refused:
            async with client(model_folder, server):
                raise AssertionError("it started")
        assert server.address in str(refused.value)
        if "ignores seeds" in message:
            async with client(model_folder, server, seeds=False) as engine:
                assert (await engine.generate(prompt_of(9), Sampling(max_tokens=2), "a")).token_ids


async def test_answers_that_cannot_be_trained_on_are_errors(model_folder):
    with StandIn(model_folder, Settings(most_tokens=10)) as server:
        async with client(model_folder, server) as engine:
            with pytest.raises(EngineError, match="ended a turn after 10 of 20 tokens: its KV cache has no room"):
                await engine.generate(prompt_of(9), Sampling(max_tokens=20, seed=1), "a")
    with StandIn(model_folder, Settings(spans=False)) as server:
        async with client(model_folder, server) as engine:
            with pytest.raises(EngineError, match="does not say which weights sampled which token"):
                await engine.generate(prompt_of(9), Sampling(max_tokens=4, seed=1), "a")


def part(finish, logprobs, count=None, **more):
    entries = [[value, token, None] for token, value in enumerate(logprobs)]
    spans = [{"version": "v", "start": 0, "end": len(entries)}]
    count = len(entries) if count is None else count
    meta = {"completion_tokens": count, "output_token_logprobs": entries, "weight_versions": spans, "finish_reason": finish}
    return {"meta_info": meta | more}


WRONG = [
    (part({"type": "stop", "matched": "NaN happened"}, [-1.0]), "for a reason other than its tokens: NaN happened"),
    (part({"type": "abort", "message": "too long", "status_code": 400}, []), "400 too long"),
    (part(None, [None]), "no finite logprob"),
    (part(None, [-1.0, -2.0], count=3), "2 logprobs in a part of an answer of 3 tokens"),
    (part({"type": "stop", "matched": 0}, [-1.0], weight_versions=[{"version": "v", "start": 0, "end": 2}]), "of 2 tokens in an"),
    (part({"type": "stop", "matched": 0}, [-1.0], weight_versions=[{"version": "v", "start": 1, "end": 2}]), "do not follow"),
]


@pytest.mark.parametrize(("answer", "message"), WRONG, ids=[message[:20] for _, message in WRONG])
async def test_a_wrong_answer_names_what_is_wrong_with_it(answer, message):
    versions = Versions()
    versions._known["v"] = 3
    given = ("http://a:1", [1, 2], Sampling(max_tokens=5, stop_token_ids=(0,)), 5)
    turn = TurnRequests(*given)
    turn.request(16, True)
    with pytest.raises(EngineError, match=re.escape(message)):
        turn.add(answer, versions)
    with pytest.raises(EngineError, match="drew the id 0, for which the tokenizer has no token"):
        TurnRequests(*given, frozenset({0})).add(part({"type": "stop", "matched": 0}, [-0.5]), versions)
    right = TurnRequests(*given)
    right.add(part({"type": "stop", "matched": 0}, [-0.5]), versions)
    assert right.versions == [3] and right.finish == "stop"


def config(model, server, *overrides):
    return config_from(
        {"env": {"id": "key_value"}, "model": {"path": model}, "engine": "sglang"},
        [f"sglang.servers={json.dumps([server])}", "sglang.timeout=5.0", *overrides],
    )


async def test_before_a_run_the_servers_are_asked(model_folder, tmp_path, monkeypatch):
    with StandIn(model_folder, Settings(context=512)) as server:
        maker = EngineChoice(config(model_folder, server.address), "sglang").maker()
        maker.check()
        assert maker.context(2048) == 506 and maker.context(100) == 100
        other = tmp_path / "other"
        other.mkdir()
        other.joinpath("config.json").write_text(json.dumps({"model_type": "llama"}))
        refused = {
            (str(other), server.address): "serves a model of type 'qwen3', and the run's is 'llama'",
            (model_folder, "http://127.0.0.1:9"): "http://127.0.0.1:9/model_info cannot be reached",
            (model_folder, "127.0.0.1:9"): "'127.0.0.1:9' is not the address of a server",
            (model_folder, server.address, "weights.lora=adapter", "model.lora={}"): 'use weights.lora = "merged"',
            (model_folder, server.address, "rollout.top_k=3", "rollout.top_p=0.6"): "set one of rollout.top_k and rollout.top_p",
            (model_folder, server.address, "sglang.api_key_env=NOT_SET"): "the environment variable NOT_SET is not set",
            (model_folder, server.address, f'sglang.servers=["{server.address}","{server.address}/"]'): "names a server twice",
            (model_folder, server.address, "sglang.servers=[]"): "needs sglang.servers",
        }
        for given, message in refused.items():
            with pytest.raises(ConfigError, match=re.escape(message)):
                EngineChoice(config(*given), "sglang").maker().check()
    with StandIn(model_folder, Settings(api_key="secret")) as server:
        monkeypatch.setenv("KEY", "secret")
        EngineChoice(config(model_folder, server.address, "sglang.api_key_env=KEY"), "sglang").maker().check()
    with pytest.raises(EngineError, match="do not give 'version': is it SGLang"):
        Facts.of("http://a:1", {"is_generation": True}, {})


async def test_weights_that_the_files_name_otherwise_cannot_be_published(tmp_path):
    """Experts are single in files and fused in modules: SGLang would pass over fused names silently."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads)).save_pretrained(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    check_names(files, expected_parameters(str(tmp_path), saved=True))
    with pytest.raises(EngineError, match=r"model\.layers\.0\.mlp\.experts\.down_proj and 1 more"):
        check_names(files, expected_parameters(str(tmp_path)))


async def test_bodies_are_held_against_the_packages_request_classes():
    known = Frozen()
    for name, body in [
        ("GenerateReqInput", {"input_ids": [1], "smapling_params": {}}),
        ("SamplingParams", {"max_tokens": 4}),
        ("SamplingParams", {"temperature": "hot"}),
        ("PauseGenerationReqInput", {"mode": "wait"}),
        ("UpdateWeightFromDiskReqInput", {"weight_version": "1"}),
        ("UpdateWeightFromDiskReqInput", {"model_path": "a", "weight_version": 1}),
    ]:
        with pytest.raises(BadRequestError, match=name):
            known.build(name, body)
    arguments = json.loads(FROZEN.read_text())["server_args"]
    assert set(DEFAULTS) <= set(arguments)


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed; its request classes are those of requests.json")
async def test_the_description_is_of_the_installed_package():
    assert FROZEN.read_text() == text_of(frozen())
