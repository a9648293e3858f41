"""Train on digits in data parallel, under any launcher: python, torchrun, srun, mpiexec, an MPIJob."""

import simparallel as sp

sp.init()
sp.set_seed(1)
digits = sp.data.digits("train")
loader = sp.data.DataLoader(digits, batch_size=32, sampler=sp.data.DistributedSampler(digits))
model = sp.parallel.DistributedDataParallel(sp.nn.Sequential(sp.nn.Linear(64, 32), sp.nn.ReLU(), sp.nn.Linear(32, 10)))
optimizer = sp.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = sp.functions.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    total = sp.all_reduce(loss.detach(), "mean")
    if sp.get_rank() == 0:
        print(f"epoch {epoch}, {sp.get_world_size()} ranks, loss is {total.item():.4f}", flush=True)
