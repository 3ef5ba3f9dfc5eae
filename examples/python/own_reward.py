"""A reward of your own for a world that ships with dart: `environment.kind: own_reward:BriskMiniWob`, started in this
folder.

A world's verdict is the only reward there is, so a new reward is a class with another verdict. This one pays less for
a solution that takes longer. What counts as a success is `curation.success_threshold`, 1 by default: set it to 0.5,
say, where slow solutions are to count as well.
"""

from dart.workers.env.miniwob import MiniWob, MiniWobEnv
from dart.worlds import Action, Image, Task, Verdict


def reward(solved: float, actions: int) -> float:
    """The task's own reward, in [0, 1], and a tenth of it less for every action after the first."""
    return solved * max(0.0, 1.0 - 0.1 * max(0, actions - 1))


class BriskEnv(MiniWobEnv):
    async def begin(self, task: Task) -> str:
        self.taken = 0
        return await super().begin(task)

    async def conclude(self, action: Action) -> Image:
        """Every action of an episode comes through here."""
        self.taken += 1
        return await super().conclude(action)

    async def grade(self) -> tuple[bool, Verdict]:
        over, verdict = await super().grade()
        return over, Verdict(reward(verdict.reward, self.taken), {**verdict.evidence, "actions": self.taken})


class BriskMiniWob(MiniWob):
    environment = BriskEnv
