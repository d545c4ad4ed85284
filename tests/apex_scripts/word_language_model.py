"""An LSTM language model as scripts had it in 2019: truncated backpropagation, clipping on master_params, accumulation.

It learns the letters of the licence and of this text, which are everywhere.
"""

import argparse
import math
import os

import torch
import torch.nn as nn

try:
    from apex import amp
except ImportError:
    amp = None

parser = argparse.ArgumentParser(description="PyTorch LSTM Language Model")
parser.add_argument("--data", type=str, default=os.path.abspath(__file__), help="text file to learn")
parser.add_argument("--emsize", type=int, default=24)
parser.add_argument("--nhid", type=int, default=48)
parser.add_argument("--nlayers", type=int, default=1)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--eps", type=float, default=1e-8)
parser.add_argument("--clip", type=float, default=0.5, help="gradient clipping")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--cuda", action="store_true", help="use CUDA")
parser.add_argument("--log-interval", type=int, default=20)
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--loss-scale", type=str, default=None)
args = parser.parse_args()

torch.manual_seed(args.seed)
if torch.cuda.is_available():
    if not args.cuda:
        print("WARNING: You have a CUDA device, so you should probably run with --cuda")
    else:
        torch.cuda.manual_seed(args.seed)

device = torch.device("cuda" if args.cuda else "cpu")

###############################################################################
# Load data
###############################################################################

with open(args.data, encoding="utf-8") as f:
    text = f.read()
letters = sorted(set(text))
ids = torch.tensor([letters.index(c) for c in text], dtype=torch.long)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    data = data.view(bsz, -1).t().contiguous()
    return data.to(device)


train_data = batchify(ids, args.batch_size)

###############################################################################
# Build the model
###############################################################################


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5):
        super(RNNModel, self).__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        self.nhid = nhid
        self.nlayers = nlayers
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.zero_()

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output.view(output.size(0) * output.size(1), output.size(2)))
        return decoded.view(output.size(0), output.size(1), decoded.size(1)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


ntokens = len(letters)
model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers, args.dropout).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=args.eps)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale)


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    else:
        return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].view(-1)
    return data, target


###############################################################################
# Train
###############################################################################

model.train()
total_loss, count, position = 0.0, 0, 0
hidden = model.init_hidden(args.batch_size)
optimizer.zero_grad()
for micro in range(args.steps * args.accumulate):
    if position + args.bptt >= len(train_data):
        position = 0
        hidden = model.init_hidden(args.batch_size)
    data, targets = get_batch(train_data, position)
    position += args.bptt
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    loss = criterion(output.view(-1, ntokens), targets) / args.accumulate
    last = (micro + 1) % args.accumulate == 0
    with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
        scaled_loss.backward()
    total_loss += loss.item() * args.accumulate
    count += 1
    if not last:
        continue
    grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    step = (micro + 1) // args.accumulate
    if step % args.log_interval == 0:
        cur_loss = total_loss / count
        print(
            "| {:5d}/{:5d} steps | grad norm {:5.2f} | loss {:.6f} | ppl {:8.2f}".format(
                step, args.steps, float(grad_norm), cur_loss, math.exp(min(cur_loss, 20))
            )
        )
        total_loss, count = 0.0, 0
