#!/bin/bash
# rLLM on GPUs of one's own: verl trains, vLLM samples.
# Settings of one's own follow on the command line:  bash train_verifiers.sh +verifiers.env_args.max_turns=5
set -euo pipefail
ENV_ID="${ENV_ID:-arithmetic}"
MODEL="${MODEL:-Qwen/Qwen3-4B}"
python3 -m verifiers.integrations.rllm.train \
    +backend=verl \
    +verifiers.env_id="$ENV_ID" \
    rllm.workflow.use_workflow=True \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.hybrid_engine=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.use_kl_loss=False \
    data.train_batch_size=64 \
    data.val_batch_size=64 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    trainer.n_gpus_per_node="${N_GPUS:-1}" \
    trainer.nnodes="${N_NODES:-1}" \
    'trainer.logger=[console]' \
    trainer.project_name=verifiers \
    trainer.experiment_name="$ENV_ID" \
    trainer.total_epochs=10 \
    "$@"
