#!/bin/bash
# verl on GPUs of one's own: Ray places the workers, FSDP trains, vLLM samples, our environment plays and scores.
# First the rows:  vf export verl arithmetic
# Settings of one's own follow on the command line:  bash train.sh trainer.total_epochs=3
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
DATA="${DATA:-data/arithmetic}"
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.return_raw_chat=True \
    data.train_batch_size=64 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loops.yaml" \
    actor_rollout_ref.rollout.agent.default_agent_loop=verifiers \
    trainer.n_gpus_per_node="${N_GPUS:-1}" \
    trainer.nnodes="${N_NODES:-1}" \
    'trainer.logger=[console]' \
    trainer.project_name=verifiers \
    trainer.experiment_name=grpo \
    trainer.total_epochs=1 \
    "$@"
