#!/usr/bin/env bash
# GRPO on GSM8K with verl 0.9.1, on one GPU, or on several: GPUS=4 recipes/verl_gsm8k/launch.sh
# Needs verl[verl-core] and vllm. The names were read in verl's sources; no GPU was at hand to run it.
# What follows the command goes to verl as well: launch.sh trainer.logger='[console,wandb]'
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
gpus=${GPUS:-1}
data=${DATA:-runs/verl_gsm8k/data}
out=$(realpath -m "${OUT:-runs/verl_gsm8k}")

[ -f "$data/test.parquet" ] || python "$here/make_data.py" --out "$data"

# A batch is 16 questions with 8 completions each (rollout.n) and makes one update, because a
# mini-batch, counted in questions too, is as large. Weights are float32 and the arithmetic bfloat16,
# as verl has it by default. Held-out questions are answered greedily before the first step and after
# every 20th. vLLM's log-probs differ a little from the trainer's, and rollout_is=token weighs each
# token by their ratio, at most 2; verl's default is not to. The same command goes on from the last
# checkpoint (trainer.resume_mode=auto).
mkdir -p "$out"
VERL_FILE_LOGGER_PATH="$out/log.jsonl" python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=16 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  data.filter_overlong_prompts=True \
  reward.custom_reward_function.path="$here/reward.py" \
  reward.custom_reward_function.name=compute_score \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.3 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  trainer.n_gpus_per_node="$gpus" \
  trainer.nnodes=1 \
  trainer.total_epochs=1 \
  trainer.total_training_steps=200 \
  trainer.val_before_train=True \
  trainer.test_freq=20 \
  trainer.save_freq=20 \
  trainer.max_actor_ckpt_to_keep=2 \
  trainer.resume_mode=auto \
  trainer.default_local_dir="$out" \
  trainer.project_name=minigrpo \
  trainer.experiment_name=verl_gsm8k \
  trainer.logger='[console,file]' \
  "$@"

# verl saves the shards of its processes. This makes a folder that from_pretrained reads.
step=$(cat "$out/latest_checkpointed_iteration.txt")
python -m verl.model_merger merge --backend fsdp \
  --local_dir "$out/global_step_$step/actor" --target_dir "$out/model"
