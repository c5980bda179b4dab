import pytest

from agentrl.render.chatml import CHATML_TEMPLATE
from tests.engines.engine_models import build_model, load
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level one with ChatML, of 342 of the model's 400 ids."""
    return build_tokenizer(CONTROL_TOKENS, CHATML_TEMPLATE)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    folder = build_model(tmp_path_factory.mktemp("qwen3"))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(model_folder):
    """The plain transformers model of `model_folder`; tests that change its weights restore them."""
    return load(model_folder)


@pytest.fixture
def spawned(monkeypatch):
    """Stand-ins for vLLM's actors, in the order they were made; `spawned.plan[i]` makes the i-th one differ."""
    from agentrl.engines.vllm import replicas
    from agentrl.engines.vllm.replicas import Replica, Replicas, RequestBatcher
    from tests.engines.replica_actors import Actor

    class Spawned(list):
        plan: dict

    actors = Spawned()
    actors.plan = {}

    def spawn(self, number):
        actor = Actor(len(actors), **actors.plan.get(len(actors), {}))
        actor.hold = actors.plan.get("hold")
        actors.append(actor)
        return Replica(number, actor, RequestBatcher(actor))

    monkeypatch.setattr(Replicas, "_spawn", spawn)
    monkeypatch.setattr(replicas.ray, "kill", lambda actor: setattr(actor, "dead", True))
    monkeypatch.setattr(replicas.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(replicas.ray, "nodes", list)
    monkeypatch.setattr(replicas.ray, "put", lambda data: data)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    return actors


@pytest.fixture
async def started(model_folder, spawned):
    """`await started(...)` -> an engine, closed after the test. `keep`: as on a CPU; `sleeps`: it now does."""
    from agentrl.config.schema import VllmConfig
    from agentrl.engines.vllm.vllm_engine import VllmEngine

    made = []

    async def start(keep=True, sleeps=False, lora_rank=None, **options):
        cfg = VllmConfig(**{"max_respawns": int(sleeps), **options})
        made.append(engine := VllmEngine(model_folder, cfg, sleeps=sleeps, lora_rank=lora_rank))
        engine._keep &= keep
        await engine.start()
        if sleeps:
            await engine.pause()
            await engine.sleep()
        return engine

    yield start
    for engine in made:
        await engine.close()
