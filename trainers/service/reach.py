"""Before a model is loaded: does every server answer that the settings name?"""

from trainers.config import TrainerConfig
from trainers.service_rules import gives_rewards


def reach(config: TrainerConfig) -> None:
    """Raises: TrainingError: one does not, within its retry_s; names the server and the setting."""
    asked = []
    if config.critic is not None and config.critic.mode == "remote":
        asked.append(("value", config.critic))
    if gives_rewards(config.env) and config.env.remote.api == "fastppo":
        asked.append(("env", config.env))
    if asked:
        from trainers.extras import require

        for module in ("httpx", "pydantic"):
            require(module, extra="server")
        from trainers.service.client import Client
    for key, part in asked:
        client = Client(part.url, part.remote, key=key)
        client.get("info")
        client.close()
