"""Train, in the order in which data flows.

../rollout.py           tasks to episodes, with trajectories and tokens (methods/ may play more)
samples.py              episodes to weighted samples of tokens, samples to rows that share prefixes
advantages.py           rewards of uses, advantages (eq. 3 to 5) and weights (eq. 5 and 7)
losses.py               log-probabilities and losses of tokens (eq. 3 and 4)
local.py                update and sync: a policy in this process; openrlhf/ on a cluster
checkpoint.py           both policies, buffer and bank in one folder
trainer.py              the loop around these, and what runs beside its steps

The extractor's way, samples and updates, is extractor_track.py.
runtime.py has the contracts of policies and runtimes; roles.py builds the agents of a run;
metrics.py writes the events; run_evaluation.py evaluates a finished run.
"""
