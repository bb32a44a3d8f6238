"""The critic and reward service: `python -m trainers.serve_critic`, and the client that trainers ask it with.

wire.py      bodies: safetensors, with a JSON header in their metadata
messages.py  what each request and answer holds, checked before anything is computed
critic.py    the served value model: trained by numbered requests, each exactly once; its checkpoints
scorer.py    the served reward
worker.py    one thread that computes, request after request, waiting ones merged; under torchrun on every rank
app.py       routes, token, limits, Prometheus metrics
connections.py  how long one may stay that asks for nothing
client.py    requests with bounded retries; errors that name the server and the setting
"""
