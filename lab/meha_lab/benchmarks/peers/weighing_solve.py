"""The task of :mod:`weighing` as one call of ``meha.solve``, whose rates fall by themselves."""

from weighing import EPOCHS, answers, clean_loss, weighted_loss

import meha


# begin
def train(task, numbers):
    net, weigher = task.networks()
    problem = meha.Problem(
        upper=lambda x, y, batch: clean_loss(y, batch[1]),
        lower=lambda x, y, batch: weighted_loss(x, y, batch[0]),
    )
    epoch = task.steps // EPOCHS
    validate = meha.observers.Validate(lambda x, y: task.accuracy(y), every=epoch, patience=None, larger_is_better=True)
    file = meha.Checkpoint(task.file, every=epoch)
    callbacks = [validate, Kill(task, epoch)]
    meha.solve(problem, weigher, net, batches=task.loaders(), max_steps=task.steps, callbacks=callbacks, checkpoint=file)
    return net.state_dict()


# end


class Kill:
    """Ends the process in the step after a checkpoint."""

    def __init__(self, task, epoch):
        self.task, self.epoch = task, epoch

    def __call__(self, run, info):
        if info.step % self.epoch == 1:
            self.task.ended(info.step // self.epoch - 1)


if __name__ == "__main__":
    answers(train)
