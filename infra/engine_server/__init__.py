"""The rollout engine over HTTP: the OpenAI API, token-level endpoints, health, metrics, and a drain that ends cleanly."""
