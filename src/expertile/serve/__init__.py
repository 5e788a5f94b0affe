"""Serving: from a model folder to an OpenAI-compatible endpoint, with vLLM where it can run, else by the engine here.

launch       what the command does: replace itself by vLLM, or run the server here
settings     what the command line and the environment ask for
server       uvicorn, signals and draining
service      loads, warms and seals in the background; what is ready, what has failed
app          routes: OpenAI's, health, metrics, status, the page
sagemaker    SageMaker AI's contract: port, folder, environment, /ping and /invocations
protocol     bodies of requests and responses
answers      requests -> sequences -> responses, whole or streamed
errors       whatever goes wrong, in OpenAI's shape
limits       size of bodies, API key
engine       the step loop: prompts are filled in, everybody's next token is computed in one batch
sequences    one choice of one request on its way through the engine
checkpoint   what is looked at before a checkpoint is served
model        weights, tokenizer, and the forward pass of a step
cache        keys and values of all sequences
sampling     logits -> next tokens
text         tokens -> text, stop strings
plans        the plans in use, layer group by layer group
metrics      Prometheus
logs         JSON lines or plain text
"""
