"""A load generator for endpoints that speak OpenAI's API; what its figures mean is in docs/bench-serve.md.

lengths, prompts   how many tokens a request has, and text or ids that have as many
stream, client     one request: server-sent events, when each was here, why it failed
drive              many: a number at once, or at random moments; within a time, and until interrupted
figures, report    TTFT, TPOT, ITL, throughput, goodput; as a table and as a row
command            `expertile bench serve`
"""
