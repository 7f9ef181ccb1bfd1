"""Code to review: find the line, and write the test that fails"""

import re

import torch

from minigrpo.exercises.form import exercise

OTHER = "Other wrong numbers pass. Work out by hand what should come out, and compare with that."


def kl_per_token(log_probs, ref_log_probs, mask):
    """All (N, T) -> k3 of each token (N, T), 0 where masked. In the mean over tokens that the
    policy draws it is KL(policy || reference).
    """
    log_ratio = ref_log_probs - log_probs
    log_ratio = torch.where(mask, log_ratio, 0.0)
    ratio = log_ratio.exp()
    return ratio - log_ratio - 1


@exercise("k3, the KL of each token", code=kl_per_token)
def test_kl_per_token(function):
    policy = torch.tensor([[0.5, 0.5]])  # of the only two tokens there are
    reference = torch.tensor([[0.8, 0.2]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    k3 = function(policy.log(), reference.log(), mask)
    kl = (policy * (policy / reference).log()).sum()  # 0.2231
    assert torch.isclose((policy * k3).sum(), kl)


test_kl_per_token.why = """Both versions are 0 for equal policies and never negative, so only a
number can tell them apart. With two tokens the KL is 0.2231, and the reversed log-ratio gives
0.339."""
test_kl_per_token.bugs = {
    ("log_ratio = ref_log_probs - log_probs", "log_ratio = log_probs - ref_log_probs"): (
        "ref_log_probs - log_probs. The other way around k3 has another mean."
    )
}
test_kl_per_token.also_lines = {5: (6, 8)}
test_kl_per_token.also_right = ["return torch.expm1(log_ratio) - log_ratio"]
test_kl_per_token.also_wrong = {
    "return ratio * log_ratio - ratio + 1": "A version whose mean is KL(reference || policy) "
    "passes as well. Compare with a number.",
    "return mask.float()": OTHER,
}
test_kl_per_token.right = ["policy = torch.tensor([[0.9, 0.1]])"]
test_kl_per_token.wrong = {
    "kl = (policy * (policy / reference - (policy / reference).log() - 1)).sum()": "Your test "
    "expects exp(d) - d - 1 with d = policy - reference. It should be d = reference - policy.",
    "reference = policy": "Equal policies give 0, and similar ones half a square, whatever the "
    "sign. Let a log-prob differ by 1 or so.",
    "assert (k3 >= 0).all()": "It takes more than not being negative. Compute a number by hand.",
}
test_kl_per_token.hints = """
With two tokens the exact KL is the sum of p * log(p / ref), the mean of k3 that of p * k3.
p = (0.5, 0.5), ref = (0.8, 0.2): 0.2231. Or by hand: new = 0, ref = 1 gives exp(1) - 1 - 1."""


def group_advantages(rewards, group_size):
    """rewards (N,), the first group_size for the first prompt, and so on -> advantages (N,).

    (reward - mean) / std of its group; equal rewards in a group give advantage 0.
    """
    groups = rewards.view(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    advantages = ((groups - mean) / groups.std(1)[:, None]).where(groups.diff().any(1, True), 0)
    return advantages.flatten()


@exercise("group advantages, two bugs", code=group_advantages)
def test_group_advantages(function):
    rewards = torch.tensor([0.0, 0.0, 3.0, 5.0, 5.0, 5.0])  # two prompts, three completions each
    found = function(rewards, 3)
    expected = torch.tensor([-0.577, -0.577, 1.155, 0.0, 0.0, 0.0])  # the std of 0, 0, 3 is 1.732
    assert torch.allclose(found, expected, atol=1e-3)


test_group_advantages.why = """One batch shows both bugs: two prompts with three completions each,
so the wrong view mixes them, and a group of equal rewards, where the code divides 0 by 0."""
test_group_advantages.bugs = {
    ("groups = rewards.view(-1, group_size)", "groups = rewards.view(group_size, -1)"): (
        "rewards.view(-1, group_size). A row is a group; view(group_size, -1) mixes prompts."
    ),
    (
        "advantages = ((groups - mean) / groups.std(1)[:, None]).where(groups.diff().any(1, "
        "True), 0)",
        "advantages = (groups - mean) / groups.std(dim=1, keepdim=True)",
    ): "torch.where(equal, 0.0, ...), where equal is True for equal rewards. 0 / 0 is NaN.",
}
test_group_advantages.also_right = [
    "groups = rewards.view(-1, group_size); groups = groups - groups[:, :1]"
]
test_group_advantages.also_wrong = {
    ("groups = rewards.view(group_size, -1)", "return 9 * advantages.flatten()"): OTHER,
    "return advantages.where(groups.diff().any(1, True), 7).flatten()": OTHER,
}
test_group_advantages.right = ["rewards = torch.tensor([1, 1, 4, 0.7, 0.7, 0.7])"]
test_group_advantages.wrong = {
    ("rewards = torch.ones(6)", "expected = torch.zeros(6)"): "Are all your rewards equal, or are "
    "there groups whose numbers you don't compare?",
    ("found = function(rewards[1:5], 2)", "expected = torch.tensor([-0.707, 0.707, 0.0, 0.0])"): (
        "With as many groups as rewards per group, the wrong view has the right shape. Is it that?"
    ),
    "assert torch.allclose(found[:3], expected[:3], atol=1e-3)": "Your test doesn't see what "
    "equal rewards get. What if all completions of a prompt are right?",
    (
        "rewards = torch.tensor([0, 3.0, 1, 0])",
        "found = function(rewards, 2)",
        "expected = rewards.sign() * 1.4142 - 0.7071",
    ): ("Two groups of two, and none of them equal? Take groups of three, one of them equal."),
}
test_group_advantages.hints = """
Is every reward compared with those of its own prompt? And what if all of them are equal?
0, 0, 3, 5, 5, 5 in groups of 3 make -0.577, -0.577, 1.155, 0, 0, 0 (tolerance 1e-3)."""


def answer_reward(completion, label):
    """1.0 if the completion's first <answer>...</answer> holds exactly the label, otherwise 0.0."""
    found = re.search(r"<answer>(.*?)</answer>", completion)
    if found is None:
        return 0.0
    answer = found.group(1).strip()
    return 1.0 if answer == label else 0.0


@exercise("reward for an answer, two bugs", code=answer_reward)
def test_answer_reward(function):
    assert function("<answer></answer>", "4") == 0.0
    assert function("<answer>4</answer> or <answer>5</answer>", "4") == 1.0


def expects(*rows):
    def test(function):
        function("", "")
        for answer, label, reward in rows:
            assert function(f"<answer>{answer}</answer>", label) == reward

    return test


SEARCH = 'found = re.search(r"<answer>(.*?)</answer>", completion)'
TWO = "4</answer> or <answer>5"
test_answer_reward.why = """The greedy star takes everything up to the last closing tag, and between
strings `in` asks for a part. In training an empty pair of tags would earn 1.0 on every question."""
test_answer_reward.bugs = {
    (SEARCH, SEARCH.replace("?", "")): "(.*?), which stops at the first </answer>.",
    ("return 1.0 if answer == label else 0.0", "return 1.0 if answer in label else 0.0"): "answer "
    "== label. Between strings, in looks for a part, and the empty string is in every label.",
}
test_answer_reward.also_right = [SEARCH.replace("n)", "n, re.DOTALL)")]
test_answer_reward.also_wrong = {
    lambda completion, label: 0.0: "A reward that is always 0 passes as well.",
    lambda completion, label: 0.5: "A reward that is always 0.5 passes as well.",
}
test_answer_reward.right = [expects(("1", "17", 0), ("4</answer></answer>", "4", 1))]
test_answer_reward.wrong = {
    expects(): "It would accept any reward, such as 0.5. Assert which one must come out.",
    expects(("7", "4", 0), ("4", "4", 1)): "You test the easy cases. What if an answer is closed "
    "twice, or only looks a little like the right one?",
    expects(("7", "4", 0), (TWO, "4", 1)): "Is one of your wrong answers a part of its label? "
    "What does in do with two strings, and what if one of them is empty?",
    expects(("", "4", 0), ("4", "4", 1)): "Is a right answer of yours closed twice?",
}
test_answer_reward.hints = """
Give it a completion with two answers, one behind the other. Then one with an empty answer.
With 4 as the label, an empty answer earns 0, and 4 before <answer>5</answer> earns 1."""


def train_on_batch(score, optimizer, advantages, epochs):
    """Several updates on one batch. score() -> log-probs (N,) of its tokens under the policy of
    this moment; advantages (N,). The clip holds the policy near the one that wrote the batch.
    """
    for _ in range(epochs):
        old = old if _ else score().detach()  # noqa: F821 (as if before the loop)
        new = score()
        ratio = (new - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@exercise("several updates from one batch", code=train_on_batch)
def test_train_on_batch(function):
    policy = torch.zeros(1, requires_grad=True)  # how far its token's log-prob has moved
    optimizer = torch.optim.SGD([policy], lr=0.1)
    function(lambda: 1 * policy, optimizer, torch.tensor([1.0]), epochs=20)
    assert policy.exp() < 1.4  # 20 free steps lead to exp(2) = 7.4


CALL_20 = "function(lambda: 1 * policy, optimizer, torch.tensor([1.0]), epochs=20)"
OLD = "old = old if _ else score().detach()  # noqa: F821 (as if before the loop)"
test_train_on_batch.why = """The old log-probs are taken anew in every epoch, so the ratio is always
1 and nothing is clipped. After 20 epochs the token is 7.4 times as likely instead of about 1.2
times."""
test_train_on_batch.bugs = {
    (OLD, "old = score().detach()"): "it belongs before the loop. Here the ratio is always 1.",
}
NEW = "new = score(); old = old if _ else new.detach()"
test_train_on_batch.also_right = [
    ("old = old if _ else None", NEW, "optimizer.step(); optimizer.zero_grad()")
]
test_train_on_batch.also_wrong = {
    ("old = None", "new = score(); old = new.detach()"): "One that calls score once per epoch "
    "passes. Look at where the policy ends, not at calls.",
    "old = score().detach(); optimizer.param_groups[0]['lr'] = 9.0": OTHER,
}
test_train_on_batch.right = [CALL_20.replace("1.0", "-1.0") + "; policy = -policy"]
test_train_on_batch.wrong = {
    "assert torch.isclose(policy, torch.tensor(2.0))": "Your test expects every epoch to move the "
    "policy as far as the first. Outside the bounds it has moved enough.",
    CALL_20.replace("20", "1"): "Do you train for a single epoch, or in such small steps that no "
    "ratio gets near the clip? Take more.",
    "assert policy > 0": "Huge steps pass. Ask how far the policy gets.",
    CALL_20.replace("1 * policy", "policy"): "It refuses all versions. Does score return the "
    "parameter itself (write 1 * policy), or is your bound too tight? The last step may pass 1.2.",
}
test_train_on_batch.hints = """
The smallest policy is its own log-prob: a parameter of 0, lambda: 1 * policy and plain SGD.
In 20 epochs at rate 0.1 it should become about 1.2 times as likely, and here it's 7.4 times."""
